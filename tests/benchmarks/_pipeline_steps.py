"""Two ranks train one Llama by the schedule 1f1b: PipelineTrainer, and a bare loop around torch's schedule.

Everybody: next-token cross-entropy averaged over the tokens of the step, AdamW with a learning rate of 1e-3
that falls linearly to 0 and no weight decay, gradients clipped to a norm of 1 over both stages, a log entry
every 50 steps. The model keeps the time itself, by the calls of its forward; see `_step_work`. Each contender
has ranks of its own, and they take turns of 50 steps.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from _pipeline_worlds import hand_over
from _step_work import CLIP_NORM, LEARNING_RATE, LOG_EVERY, WARM_UP, Clock, Example, Window, mean_loss
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from dist_env import DistributedEnvInterface
from llama_pretrain import Llama, LlamaConfig
from trainer_pipeline import PipelineArguments, PipelineTrainer, PipelineTrainingArguments

MICROBATCHES, ROWS = 4, 8
BARE, BARE_FUSED, OURS = "bare loop", "bare loop, fused AdamW", "trainer-pipeline"
CONTENDERS = (BARE, BARE_FUSED, OURS)
TOLERANCE = {"loss": 1e-4, "weights": 1e-3}
"""Most that one may deviate from the bare loop: the loss relative to it, the weights relative to the way that
they went."""


class Shape(NamedTuple):
    """A model of two layers, and the length of its rows."""

    config: LlamaConfig
    positions: int


SHAPES = {
    "nano": Shape(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
        ),
        8,
    ),
    "tiny": Shape(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        64,
    ),
}


class TurnClock(Clock):
    """Notes what windows of steps cost on this rank, and hands over after each of them on the first one."""

    def __init__(self, *, hands_over: bool) -> None:
        super().__init__()
        self.microbatches = 0
        self.measured: list[Window] = []
        self._hands_over = hands_over
        self._began: tuple[float, float] | None = None

    def tick(self) -> None:
        """Count a forward pass, of which a step has several; the first one begins it."""
        if not torch.is_grad_enabled():
            return  # learns the shapes of what is sent
        self.microbatches += 1
        if self.microbatches % MICROBATCHES == 1:
            super().tick()

    def note(self) -> None:
        """A window ends, and the next one begins."""
        if self._began is not None:
            cpu, wall = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
            self.measured.append(Window(cpu / LOG_EVERY * 1e3, wall / LOG_EVERY * 1e3))
        if self._hands_over:
            hand_over()
        self._began = (time.process_time(), time.perf_counter())

    def windows(self) -> list[Window]:
        """Oldest first."""
        return self.measured


class Clocked(nn.Module):
    """A Llama that counts its calls: one for each microbatch."""

    def __init__(self, config: LlamaConfig, clock: TurnClock) -> None:
        super().__init__()
        self.llama = Llama(config)
        self.clock = clock

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        self.clock.tick()
        logits: Tensor = self.llama(input_ids)
        return logits


class Half(nn.Module):
    """The first or the second half of a Llama, as a hand-written stage."""

    def __init__(self, whole: Clocked, *, first: bool) -> None:
        super().__init__()
        backbone = whole.llama.model
        self.clock, self.rotary = whole.clock, backbone.rotary_emb
        self.embed = backbone.embed_tokens if first else None
        self.layer = backbone.layers[0 if first else 1]
        self.end = None if first else nn.Sequential(backbone.norm, whole.llama.lm_head)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states of token ids, or logits of hidden states."""
        self.clock.tick()
        cos, sin = self.rotary(0, x.shape[1])
        x = x if self.embed is None else self.embed(x)
        x = self.layer(x, cos, sin, None)
        return x if self.end is None else cast("Tensor", self.end(x))


class Run(NamedTuple):
    """What a contender did on this rank.

    Attributes:
        cpu: Milliseconds of processor time per step, for each window of 50 steps.
        wall: Milliseconds per step, likewise.
        setup: Seconds until the first step.
        loss: Mean loss of the last log entry; none where this rank does not have it.
        weights: Those of this rank by name.
    """

    cpu: list[float]
    wall: list[float]
    setup: float
    loss: float | None
    weights: dict[str, Tensor]


def measure(
    env: DistributedEnvInterface, *, label: str, shape: str, windows: int, directory: str
) -> tuple[Run, dict[str, Tensor]]:
    """Train one contender.

    Args:
        env: This rank.
        label: Which contender.
        shape: Name of the model.
        windows: Of 50 steps each, after a warm-up.
        directory: Where the trainer may write.

    Returns:
        What it did on this rank, and the weights that it began with.
    """
    steps = WARM_UP + LOG_EVERY * windows + 1
    examples = _examples(SHAPES[shape], steps)
    gc.collect()
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        run = _run(env, label, SHAPES[shape].config, examples, steps, Path(directory))
    return run, _weights(_model(SHAPES[shape].config, env))


def figures(told: Mapping[str, Sequence[tuple[Run, dict[str, Tensor]]]]) -> list[dict[str, Any]]:
    """What all contenders did, for each rank, and the deviations of the others from the bare loop.

    Raises:
        ValueError: A contender did other work.
    """
    found = []
    for rank, (_, begin) in enumerate(told[BARE]):
        runs = {label: each[rank][0] for label, each in told.items()}
        contenders = {
            label: {"cpu": run.cpu, "wall": run.wall, "setup": run.setup, "loss": run.loss}
            for label, run in runs.items()
        }
        found.append({"contenders": contenders, "deviations": _deviations(runs, begin)})
    return found


def _examples(shape: Shape, steps: int) -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.config.vocab_size, (steps * ROWS, shape.positions), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _model(config: LlamaConfig, env: DistributedEnvInterface) -> Clocked:
    torch.manual_seed(0)
    return Clocked(config, TurnClock(hands_over=env.rank == 0))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in model.named_parameters()}


def _run(
    env: DistributedEnvInterface,
    label: str,
    config: LlamaConfig,
    examples: list[Example],
    steps: int,
    directory: Path,
) -> Run:
    began = time.perf_counter()
    if label == OURS:
        model, loss = _ours(env, config, examples, steps, directory)
    else:
        model, loss = _bare(env, config, examples, steps, fused=True if label == BARE_FUSED else None)
    clock = model.clock
    windows = clock.windows()
    setup = clock.first[1] - began if clock.first else 0.0
    return Run([each.cpu for each in windows], [each.wall for each in windows], setup, loss, _weights(model))


def _bare(
    env: DistributedEnvInterface,
    config: LlamaConfig,
    examples: list[Example],
    steps: int,
    *,
    fused: bool | None,
) -> tuple[Clocked, float | None]:
    """The loop that one writes with torch.distributed.pipelining; each rank reads what it needs."""
    first = env.rank == 0
    model = _model(config, env)
    half = Half(model, first=first)
    stage = PipelineStage(half, env.rank, env.world_size, env.device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_loss)
    parameters = list(half.parameters())
    optimizer = AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)
    rate = LambdaLR(optimizer, lambda step: 1 - step / steps)
    total, mean = torch.zeros(()), None
    loader = DataLoader(cast("Dataset[Example]", examples), batch_size=ROWS)
    for step, batch in enumerate(loader, start=1):
        losses: list[Tensor] = []
        if first:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
            total += torch.stack(losses).detach().mean()
        norm = nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None])
        squares = norm * norm
        dist.all_reduce(squares)
        norm = squares.sqrt()
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0 and not first:
            mean = total.item() / LOG_EVERY
            total.zero_()
            print(step, mean, norm.item(), rate.get_last_lr()[0])
    return model, mean


def _ours(
    env: DistributedEnvInterface, config: LlamaConfig, examples: list[Example], steps: int, directory: Path
) -> tuple[Clocked, float | None]:
    """`PipelineTrainer` with its default callbacks; rank 0 reads for all."""
    args = PipelineTrainingArguments(
        output_dir=str(directory / "steps"),
        use_cpu=True,
        seed=0,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        dataloader_shuffle=False,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        resume_from_checkpoint=False,
        pipeline=PipelineArguments(schedule="1f1b", n_microbatches=MICROBATCHES),
    )
    trainer = PipelineTrainer(
        args, model_init=lambda: _model(config, env), train_dataset=examples, distributed_env=env
    )
    trainer.train()
    losses = [
        entry["loss"]
        for entry in trainer.state.log_history
        if "loss" in entry and cast("int", entry["global_step"]) % LOG_EVERY == 0
    ]
    return cast("Clocked", trainer.unwrapped_model()), cast("float", losses[-1])


def _deviations(runs: Mapping[str, Run], first: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """How far each contender ended from the bare loop, on this rank.

    Raises:
        ValueError: Farther than `TOLERANCE`.
    """
    bare, ours = runs[BARE], runs[OURS]
    # A bare loop leaves the other half in its model, as it was.
    names = list(ours.weights)
    way = _distance(bare.weights, first, names)
    found: dict[str, dict[str, float]] = {}
    for label, run in runs.items():
        found[label] = {"weights": _distance(run.weights, bare.weights, names) / way}
        if bare.loss is not None and run.loss is not None:
            found[label]["loss"] = abs(run.loss / bare.loss - 1)
        for kind, deviation in found[label].items():
            if not deviation <= TOLERANCE[kind]:
                raise ValueError(
                    f"{label} did other work than the bare loop: its {kind} deviates by {deviation:.1e}, "
                    f"more than {TOLERANCE[kind]:.0e}"
                )
    return found


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]) -> float:
    squares = [torch.linalg.vector_norm(one[name] - other[name]) for name in names]
    return float(torch.linalg.vector_norm(torch.stack(squares)))
