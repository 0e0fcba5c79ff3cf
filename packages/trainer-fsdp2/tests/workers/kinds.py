"""Compilation, and the dtypes and places of what is sharded."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import LENGTH, VOCABULARY, WIDTH, Batches, Tiny, losses, trainer_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from dist_env import DistributedEnvInterface, StaticDistributedEnvironment
from model_parallel import CausalAttention
from trainer_core import ConfigurationError, DataParallelArguments, Trainer, TrainingArguments


def compiled(env: DistributedEnvInterface, folder: Path, scope: str) -> dict[str, object]:
    """What torch compiles in a run."""
    torch._dynamo.reset()
    counters.clear()
    trainer = trainer_of(
        env,
        folder,
        partial(Tiny, 3),
        train=Batches(),
        torch_compile=True,
        torch_compile_backend="aot_eager",
        torch_compile_scope=scope,
    )
    trainer.train()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "recompiles": sum(counters["recompiles"].values()),
        "compiled": [
            name
            for name, module in trainer.unwrapped_model().named_modules()
            if module._compiled_call_impl is not None
        ],
        "losses": losses(trainer),
    }


def compiling(env: DistributedEnvInterface, folder: Path) -> object:
    """The model as a whole, and its blocks."""
    eager = trainer_of(env, folder / "eager", partial(Tiny, 3), train=Batches())
    eager.train()
    return {
        "eager": losses(eager),
        "model": compiled(env, folder / "model", "model"),
        "blocks": compiled(env, folder / "blocks", "blocks"),
    }


class State:
    """Notes dtypes and devices, before a step and at the end."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kw: object) -> None:
        model: nn.Module = kw["model"]  # type: ignore[assignment]
        self._note("gradients", [p.grad for p in model.parameters() if p.grad is not None])

    def on_train_end(self, args: object, state: object, control: object, **kw: object) -> None:
        model: nn.Module = kw["model"]  # type: ignore[assignment]
        self._note("weights", list(model.parameters()))
        optimizer: torch.optim.Optimizer = kw["optimizer"]  # type: ignore[assignment]
        values = [value for each in optimizer.state.values() for value in each.values()]
        self._note("optimizer", [value for value in values if isinstance(value, Tensor) and value.ndim])

    def _note(self, what: str, tensors: list[Tensor]) -> None:
        kinds = Counter(
            f"{'shard' if isinstance(tensor, DTensor) else 'whole'} {tensor.dtype} {tensor.device.type}"
            for tensor in tensors
        )
        self.found[what] = sorted(kinds)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


def kept(env: DistributedEnvInterface, folder: Path, **settings: object) -> object:
    """A run; the kinds of its tensors, what layers compute with, and the table that it prints."""
    state, lines, computing = State(), Lines(), set()
    logging.getLogger().addHandler(lines)
    trainer = trainer_of(env, folder, train=Batches(), callbacks=[state], **settings)  # type: ignore[arg-type]
    layer = trainer.unwrapped_model().layers[0].mixing  # type: ignore[index, union-attr]
    logging.getLogger().removeHandler(lines)
    layer.register_forward_hook(
        lambda module, inputs, output: computing.update(
            {f"input {inputs[0].dtype}", f"weight {module.weight.dtype}", f"output {output.dtype}"}
        )
    )
    trainer.train()
    return {
        **state.found,
        "computing": sorted(computing),
        "table": lines.lines,
        "losses": losses(trainer),
    }


class Attending(nn.Module):
    """Attends in a way that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attend = CausalAttention()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x = (self.embed(input_ids) + self.places(position_ids)).unsqueeze(1)
        for layer in self.layers:
            x = x + self.attend(layer(x), x, x, document_ids)
        return self.head(x.squeeze(1))


def closeness(predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean probability of the next token."""
    assert isinstance(predictions, Tensor)
    chances = predictions[:, :-1].softmax(-1).gather(-1, labels[:, 1:, None])
    return chances.sum(), torch.tensor(chances.numel())


def divided(env: DistributedEnvInterface, folder: Path) -> object:
    """Curve, evaluation and metric with half of each sequence on each rank, and as one process."""
    found = []
    for mesh in ("cp=2", None):
        given: dict[str, object] = {
            "output_dir": str(folder / (mesh or f"alone-{env.rank}")),
            "use_cpu": True,
            "seed": 3,
            "per_device_train_batch_size": Batches.batch_size,
            "max_steps": 3,
            "num_train_epochs": -1,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "check_flops": False,
        }
        args = DataParallelArguments(mesh=mesh, **given) if mesh else TrainingArguments(**given)  # type: ignore[arg-type]
        trainer = Trainer(
            args,
            model_init=Attending,
            train_dataset=Batches(),
            eval_dataset=Batches(7),
            eval_metrics={"closeness": closeness},
            distributed_env=env if mesh else StaticDistributedEnvironment(),
        )
        trainer.train()
        scored = trainer.evaluate()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        state = trainer.state
        found.append(
            {
                "curve": [[entry[name] for name in ("loss", "grad_norm")] for entry in logged],
                "tokens": [state.num_input_tokens_seen, state.num_target_tokens_seen, state.total_flos],
                "scored": [scored[f"eval_{name}"] for name in ("loss", "tokens", "closeness")],
            }
        )
    return found


def undividable(env: DistributedEnvInterface, folder: Path) -> object:
    """What a model is told that attends by itself."""
    try:
        trainer_of(env, folder, train=Batches(), mesh="cp=2").train()
    except ConfigurationError as error:
        return str(error)
    return None


SCENARIOS: dict[str, Scenario] = {
    "divided sequences": divided,
    "sequences that cannot be divided": undividable,
    "compiling": compiling,
    "plain": kept,
    "bf16 policy": partial(kept, param_dtype="bfloat16"),
    "bf16 autocast": partial(kept, mixed_precision="bf16"),
    "on the host": partial(kept, cpu_offload=True),
}
