"""Measure what FSDP2 and tensor parallelism cost beside bare loops: CPU and wall milliseconds per step.

    python tests/benchmarks/sharded.py --json sharded.json

Two ranks over gloo on this machine, one thread each, train a Llama: `trainer_core.Trainer` with
`mesh=shard=2` beside a bare loop around `torch.distributed.fsdp.fully_shard`, and with `mesh=tp=2` beside one
around `torch.distributed.tensor.parallel.parallelize_module`.

Everybody: next-token cross-entropy averaged over the tokens, fused AdamW with a rate of 1e-3 that falls
linearly to 0 and no weight decay, gradients clipped to a norm of 1 over all ranks, a log entry every 50 steps
with loss, norm and rate. In each round all run once, in an order that moves on by one; the model keeps the
time, by the calls of its forward. Nothing is asserted about time; a way whose losses are not those of its
bare loop is an error.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from _step_report import _percentile, _spread
from _step_work import CLIP_NORM, LEARNING_RATE, LOG_EVERY, WARM_UP, Clock, Example, mean_loss
from _timing import machine, print_table
from ddp import WORLD_SIZE, _variables, _wait
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dist_env import DistributedEnvInterface, DistributedEnvironment, gather_objects
from llama_pretrain import Llama, LlamaConfig
from trainer_core import DataParallelArguments, Trainer

ROUNDS, WINDOWS, QUIET = 10, 1, 10
TOLERANCE = 1e-4
"""Most that the mean loss of the last window may differ from the bare loop's, relative to it."""


@dataclass(frozen=True)
class Shape:
    """A model, and the rows of one step on each of the ranks that read other data."""

    config: LlamaConfig
    rows: int
    positions: int


SHAPES = {
    "tiny": Shape(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        rows=4,
        positions=64,
    ),
    "small": Shape(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            max_position_embeddings=128,
        ),
        rows=4,
        positions=128,
    ),
}


class Clocked(nn.Module):
    """A Llama that counts its calls, one for each step."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.llama = Llama(config)
        self.clock = Clock()

    @property
    def tp_plan(self) -> dict[str, str]:
        """That of the Llama inside."""
        return {f"llama.{name}": style for name, style in self.llama.tp_plan.items()}

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        self.clock.tick()
        logits: Tensor = self.llama(input_ids)
        return logits


@dataclass(frozen=True)
class Work:
    """What one rank trains."""

    env: DistributedEnvInterface
    shape: Shape
    steps: int
    directory: Path

    def model(self) -> Clocked:
        """A new model with the same weights each time."""
        torch.manual_seed(0)
        return Clocked(self.shape.config)

    def examples(self, readers: int) -> list[Example]:
        """Those of all ranks, of which so many read others."""
        generator = torch.Generator().manual_seed(0)
        rows = self.steps * self.shape.rows * readers
        tokens = torch.randint(
            self.shape.config.vocab_size, (rows, self.shape.positions), generator=generator
        )
        return [{"input_ids": row, "labels": row} for row in tokens]


@dataclass(frozen=True)
class Run:
    """Milliseconds of each window on this rank, and the mean loss of the last one."""

    cpu: list[float]
    wall: list[float]
    loss: float


def bare_fsdp2(work: Work) -> Run:
    """The loop that one writes around `fully_shard`."""
    model = work.model()
    mesh = init_device_mesh("cpu", (work.env.world_size,))
    for block in model.llama.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def clip() -> Tensor:
        return cast("DTensor", nn.utils.clip_grad_norm_(parameters, CLIP_NORM)).full_tensor()

    return _loop(work, model, optimizer, clip, readers=work.env.world_size)


def bare_tensor(work: Work) -> Run:
    """The loop that one writes around `parallelize_module`; what is not divided is whole on each rank."""
    model, mesh = work.model(), init_device_mesh("cpu", (work.env.world_size,))
    _parallelize(model, mesh)
    divided = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    groups: list[dict[str, Any]] = [{"params": divided}, {"params": whole}]
    optimizer = AdamW(groups, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def clip() -> Tensor:
        parts = [nn.utils.get_total_norm([each.grad for each in group]) for group in (divided, whole)]  # type: ignore[misc]
        norm = torch.hypot(cast("DTensor", parts[0]).full_tensor(), parts[1])
        nn.utils.clip_grads_with_norm_(divided, CLIP_NORM, norm)
        nn.utils.clip_grads_with_norm_(whole, CLIP_NORM, norm)
        return norm

    return _loop(work, model, optimizer, clip, readers=1)


def _parallelize(model: Clocked, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(model.llama.config.num_hidden_layers):
        layer = f"model.layers.{number}"
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model.llama, mesh, plan)


def _loop(work: Work, model: Clocked, optimizer: AdamW, clip: Callable[[], Tensor], *, readers: int) -> Run:
    examples = cast("Dataset[Example]", work.examples(readers))
    rank = work.env.rank if readers > 1 else 0
    sampler: DistributedSampler[Example] = DistributedSampler(examples, readers, rank, shuffle=False)
    rate = LambdaLR(optimizer, lambda step: 1 - step / work.steps)
    total, mean = torch.zeros(()), 0.0
    for step, batch in enumerate(DataLoader(examples, work.shape.rows, sampler=sampler), start=1):
        loss = mean_loss(model(batch["input_ids"]), batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip()
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % LOG_EVERY == 0:
            dist.all_reduce(total)
            mean = total.item() / LOG_EVERY / work.env.world_size
            total.zero_()
            print(step, mean, norm.item(), rate.get_last_lr()[0])
    return _run(model, mean)


def ours(work: Work, *, mesh: str, dispatch: bool) -> Run:
    """`Trainer` with that mesh and its default callbacks; rank 0 reads for all, or each for itself."""
    args = DataParallelArguments(
        output_dir=str(work.directory),
        use_cpu=True,
        max_steps=work.steps,
        mesh=mesh,
        per_device_train_batch_size=work.shape.rows,
        learning_rate=LEARNING_RATE,
        max_grad_norm=CLIP_NORM,
        dataloader_shuffle=False,
        dispatch_batches=dispatch,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        resume_from_checkpoint=False,
    )
    readers = work.env.world_size if mesh.startswith("shard") else 1
    data = work.examples(readers)
    if readers > 1 and not dispatch:
        rows = work.shape.rows
        firsts = range(work.env.rank * rows, len(data), rows * readers)
        data = [example for first in firsts for example in data[first : first + rows]]
    trainer = Trainer(args, model_init=work.model, train_dataset=data, distributed_env=work.env)
    trainer.train()
    # The last step has an entry of its own.
    losses = {entry["global_step"]: entry.get("loss") for entry in trainer.state.log_history}
    return _run(cast("Clocked", trainer.unwrapped_model()), cast("float", losses[LOG_EVERY * WINDOWS]))


def _run(model: Clocked, loss: float) -> Run:
    windows = model.clock.windows()
    return Run([each.cpu for each in windows], [each.wall for each in windows], loss)


Way = Callable[[Work], Run]
WAYS: Mapping[str, Mapping[str, Way]] = {
    "fully_shard": {
        "bare loop": bare_fsdp2,
        "trainer-core, shard=2": lambda work: ours(work, mesh="shard=2", dispatch=True),
        "trainer-core, shard=2, each rank reads": lambda work: ours(work, mesh="shard=2", dispatch=False),
    },
    "parallelize_module": {
        "bare loop": bare_tensor,
        "trainer-core, tp=2": lambda work: ours(work, mesh="tp=2", dispatch=True),
        "trainer-core, tp=2, each rank reads": lambda work: ours(work, mesh="tp=2", dispatch=False),
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = _parse(arguments)
    results: dict[str, Any] = {"benchmark": "sharded", "machine": machine(Path.cwd(), ("torch",))}
    with tempfile.TemporaryDirectory(prefix="sharded-benchmark-") as folder:
        told = Path(folder) / "told.json"
        asked = json.dumps({"shapes": options.only, "rounds": options.rounds, "directory": folder})
        command = [sys.executable, "-W", "ignore", __file__, "--rank", asked, str(told)]
        ranks = [subprocess.Popen(command, env=variables) for variables in _variables()]
        try:
            _wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results["shapes"] = json.loads(told.read_text())
    for name, layouts in results["shapes"].items():
        for layout, samples in layouts.items():
            print(f"\n{name}, {WORLD_SIZE} ranks, beside a bare loop around {layout}\n")
            print_table(_rows(samples))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _of_a_rank(asked: Mapping[str, Any], told: Path) -> None:
    torch.set_num_threads(1)
    with DistributedEnvironment(no_accelerator=True, training_timeout=300) as env:
        found: dict[str, Any] = {}
        for name in asked["shapes"]:
            steps = WARM_UP + LOG_EVERY * WINDOWS + 1
            work = Work(env, SHAPES[name], steps, Path(asked["directory"]) / "run")
            found[name] = {layout: _rounds(work, ways, asked["rounds"]) for layout, ways in WAYS.items()}
        if env.rank == 0:
            told.write_text(json.dumps(found))


def _rounds(work: Work, ways: Mapping[str, Way], rounds: int) -> dict[str, Any]:
    """Milliseconds of every way in every round, as the mean of the ranks, after a round that checks."""
    samples: dict[str, list[Mapping[str, float]]] = {label: [] for label in ways}
    labels = list(ways)
    for number in range(rounds + 1):
        shift = number % len(labels)
        losses = {}
        for label in labels[shift:] + labels[:shift]:
            gc.collect()
            dist.barrier()
            with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                run = ways[label](work)
            losses[label] = run.loss
            told = gather_objects({"cpu": run.cpu[0], "wall": run.wall[0]}, work.env)
            if number:
                mean = {clock: sum(each[clock] for each in told) / len(told) for clock in ("cpu", "wall")}
                samples[label].append(mean)
        for label, loss in losses.items():
            far = abs(loss / losses["bare loop"] - 1)
            if not far <= TOLERANCE:
                raise ValueError(f"{label} did other work than the bare loop: its loss is off by {far:.1e}")
        if work.env.rank == 0:
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return samples


def _rows(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    table = [
        [
            "",
            "CPU ms, quiet",
            "ratio, median (10 % to 90 %)",
            "wall ms, quiet",
            "ratio, median (10 % to 90 %)",
        ]
    ]
    for label, taken in samples.items():
        cells = [label]
        for clock in ("cpu", "wall"):
            values = [each[clock] for each in taken]
            beside = [each[clock] for each in samples["bare loop"]]
            ratio = _spread([one / other for one, other in zip(values, beside, strict=True)])
            cells.append(f"{_percentile(values, QUIET):.1f}")
            cells.append(f"{ratio['median']:.2f} ({ratio['quiet']:.2f} to {ratio['high']:.2f})")
        table.append(cells)
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SHAPES), help="comma-separated, of: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of the smaller model: does it run?")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    options = parser.parse_args(arguments)
    options.only = ["tiny"] if options.quick else options.only.split(",")
    if unknown := set(options.only) - set(SHAPES):
        parser.error(f"--only names {sorted(unknown)}; choose among {list(SHAPES)}")
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    options.rounds = 1 if options.quick else options.rounds
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _of_a_rank(json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
