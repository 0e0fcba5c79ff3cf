"""One model, divided over ranks in every way, saved and loaded. Usage: layouts.py DIRECTORY [LAYOUT ...].

Saves the same state under each layout, then loads each checkpoint under each layout, and prints one JSON
object: what each rank saw. Ranks are forked from this process, so that torch is imported once.
"""

import functools
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    LoadedCheckpoint,
    ModelState,
    OptimizerState,
    RNGState,
    SharingPattern,
    StateComponent,
    StaticStatefulProvider,
)
from dist_env import StaticDistributedEnvironment

WIDTH = 24
BLOCKS = 4
STEPS = 3


class Block(nn.Module):
    """A residual block; 5 rows do not divide evenly among ranks, and a buffer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 37)
        self.down = nn.Linear(37, WIDTH, bias=False)
        self.odd = nn.Parameter(torch.randn(5, WIDTH))
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale.sum() + self.odd.sum(0)


class Model(nn.Module):
    """A language model in miniature, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) * self.temperature


class Layout:
    """How a model lies on the ranks of a job."""

    def __init__(self, world: int, divide: Callable[["Held", int], None], pattern: SharingPattern) -> None:
        self.world = world
        self.divide = divide
        self.pattern = pattern


class Held:
    """What one rank holds: the parts of a trained model, and an optimizer over them."""

    def __init__(self, layout: Layout, rank: int, seed: int, train: bool) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        if train:
            self.trained = train_whole(self.model)
        self.parts: list[nn.Module] = [self.model]
        self.tied: dict[str, str] = {}
        layout.divide(self, rank)
        self.parameters = list(dict.fromkeys(p for part in self.parts for p in part.parameters()))
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.5)
        if train:
            self._take_over_optimizer()

    def _take_over_optimizer(self) -> None:
        """Give the optimizer the state that training the whole model left, each rank its part."""
        names = {id(p): name for part in self.parts for name, p in part.named_parameters()}
        self.optimizer.param_groups[0]["lr"] = 0.01
        for parameter in self.parameters:
            whole = self.trained[self.tied.get(names[id(parameter)], names[id(parameter)])]
            self.optimizer.state[parameter] = {
                "step": whole["step"].clone(),
                "exp_avg": like(parameter, whole["exp_avg"]),
                "exp_avg_sq": like(parameter, whole["exp_avg_sq"]),
            }

    def components(self, layout: Layout) -> list[StateComponent]:
        model = ModelState(self.parts, tied=self.tied)
        optimizer = OptimizerState(self.optimizer, self.parts, tied=self.tied)
        return [
            StateComponent(key="model", stateful=model, sharing_pattern=layout.pattern, required=True),
            StateComponent(key="optimizer", stateful=optimizer, sharing_pattern=layout.pattern),
            StateComponent(key="rng", stateful=RNGState(), sharing_pattern=SharingPattern.PER_RANK),
        ]

    def whole(self) -> dict[str, torch.Tensor]:
        """Everything this rank holds, DTensors gathered, by name."""
        found = {}
        for part in self.parts:
            for name, tensor in part.state_dict().items():
                found[name] = full(tensor)
        names = {id(p): name for part in self.parts for name, p in part.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{names[id(parameter)]}.{key}"] = full(value)
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        return found


def train_whole(model: Model) -> dict[str, dict[str, torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.arange(6) + step).square().mean().backward()
        optimizer.step()
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole.clone()
    result = torch.empty_like(parameter.detach())
    chunk = parameter.__create_chunk_list__()[0]
    box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
    result.to_local().copy_(whole[box])
    return result


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def keep_whole(held: Held, rank: int) -> None:
    del held, rank


def shard(shape: tuple[int, ...], dim: int = 0) -> Callable[[Held, int], None]:
    def divide(held: Held, rank: int) -> None:
        del rank
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

        def placement(parameter: nn.Parameter) -> Shard:
            # FSDP divides only the first dimension unevenly.
            even = parameter.ndim > dim and parameter.shape[dim] % shape[-1] == 0
            return Shard(dim if even else 0)

        for block in held.model.blocks.values():
            fully_shard(block, mesh=mesh, shard_placement_fn=placement)
        fully_shard(held.model, mesh=mesh, shard_placement_fn=placement)

    return divide


def stages(count: int, sharded: int = 1) -> Callable[[Held, int], None]:
    """Pipeline stages in a loop: rank r holds blocks r, r + count, ...; the last holds the head by itself."""

    def divide(held: Held, rank: int) -> None:
        model = held.model
        head = nn.Parameter(model.embed.weight.detach().clone())
        mesh = init_device_mesh("cpu", (count, sharded), mesh_dim_names=("stage", "shard"))
        place = rank // sharded
        held.parts = []
        for number in range(place, BLOCKS, count):
            stage = nn.Module()
            stage.blocks = nn.ModuleDict({str(number): model.blocks[str(number)]})
            if number == 0:
                stage.embed = model.embed
            if number == BLOCKS - 1:
                stage.head = nn.Module()
                stage.head.weight = head
                stage.temperature = model.temperature
            if sharded > 1:
                fully_shard(stage, mesh=mesh["shard"])
            held.parts.append(stage)
        held.tied = {"head.weight": "embed.weight"}

    return divide


S, R = SharingPattern.SHARDED, SharingPattern.REPLICATED
LAYOUTS = {
    "whole": Layout(1, keep_whole, R),
    "copies on 2": Layout(2, keep_whole, R),
    "shards on 1": Layout(1, shard((1,)), S),
    "shards on 2": Layout(2, shard((2,)), S),
    "shards on 3": Layout(3, shard((3,)), S),
    "shards on 4": Layout(4, shard((4,)), S),
    "columns on 2": Layout(2, shard((2,), dim=1), S),
    "2 copies of 2 shards": Layout(4, shard((2, 2)), S),
    "2 stages": Layout(2, stages(2), S),
    "4 stages": Layout(4, stages(4), S),
    "2 stages of 2 shards": Layout(4, stages(2, sharded=2), S),
}


class Job:
    """One rank of a job under one layout."""

    def __init__(self, directory: Path, layout: str, rank: int) -> None:
        self.directory = directory
        self.name = layout
        self.layout = LAYOUTS[layout]
        self.rank = rank
        world = self.layout.world
        self.env = StaticDistributedEnvironment(
            rank=rank, local_rank=rank, world_size=world, local_world_size=world, backend="gloo"
        )

    def manager(self, held: Held, run: str) -> CheckpointManager:
        provider = StaticStatefulProvider(held.components(self.layout))
        config = CheckpointConfig(output_dir=self.directory / run, timeout_seconds=60, max_shard_size=8000)
        return CheckpointManager(config, dist=self.env, stateful_provider=provider)

    def save(self) -> dict[str, object]:
        held = Held(self.layout, self.rank, seed=1, train=True)
        with self.manager(held, self.name) as manager:
            path = manager.save_checkpoint(STEPS)
            exported = manager.save_model(self.directory / f"{self.name} exported")
        return {"files": sorted(file.name for file in path.iterdir()), "exported": str(exported)}

    def load(self, *sources: str) -> list[dict[str, object]]:
        """Load each of them into a new model, one after another."""
        return [self._load(source) for source in sources]

    def _load(self, source: str) -> dict[str, object]:
        held = Held(self.layout, self.rank, seed=2, train=False)
        before = read_bytes()
        with self.manager(held, source) as manager:
            loaded = manager.load_checkpoint()
        if loaded is None:
            raise RuntimeError(f"nothing was found of {source}")
        total = read_bytes() - before
        return {**self.compare(held), **counts(held, loaded), "read by the system": total}

    def compare(self, held: Held) -> dict[str, object]:
        expected = expected_values()
        found = held.whole()
        wrong = []
        for name, value in found.items():
            alias = name.replace("head.weight", "embed.weight") if held.tied else name
            if not torch.equal(value, expected[alias]):
                wrong.append(name)
        return {"compared": len(found), "wrong": wrong}


@functools.cache
def expected_values() -> dict[str, torch.Tensor]:
    """What one process has after its training."""
    torch.manual_seed(1)
    whole = Model()
    trained = train_whole(whole)
    expected = dict(whole.state_dict())
    for name, state in trained.items():
        expected.update({f"{name}.{key}": value for key, value in state.items()})
    return {**expected, "lr": torch.tensor(0.01)}


def counts(held: Held, loaded: LoadedCheckpoint) -> dict[str, object]:
    """Bytes this rank holds, and bytes it read."""
    seen: dict[int, torch.Tensor] = {}
    tensors = [t for part in held.parts for t in part.state_dict(keep_vars=True).values()]
    tensors += [t for state in held.optimizer.state.values() for t in state.values()]
    for tensor in tensors:
        seen[id(tensor)] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    own = sum(tensor.numel() * tensor.element_size() for tensor in seen.values())
    return {"own": own, "read": loaded.bytes_read, "missing": loaded.missing}


def read_bytes() -> int:
    """Bytes this process has read from files, as the operating system counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def run_ranks(directory: Path, layout: str, action: str, *arguments: str) -> list[Any]:
    """Fork the ranks of a layout, let each call one method of its job, and gather what they return."""
    tag = f"{layout} {action}"
    children = []
    for rank in range(LAYOUTS[layout].world):
        child = os.fork()
        if child == 0:
            os._exit(_run_rank(directory, layout, rank, tag, action, arguments))
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(f"{tag}: ranks ended with {statuses}")
    reports = [directory / f"{tag} {rank}.json" for rank in range(len(children))]
    return [json.loads(report.read_text()) for report in reports]


def _run_rank(
    directory: Path, layout: str, rank: int, tag: str, action: str, arguments: tuple[str, ...]
) -> int:
    try:
        world = LAYOUTS[layout].world
        store = dist.FileStore(str(directory / f"{tag} store"), world)
        limit = timedelta(seconds=90)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
        report = getattr(Job(directory, layout, rank), action)(*arguments)
        (directory / f"{tag} {rank}.json").write_text(json.dumps(report))
        gc.collect()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - a rank reports by its exit status
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    directory = Path(sys.argv[1])
    layouts = sys.argv[2:] or list(LAYOUTS)
    torch.set_num_threads(1)
    results = {"save": {name: run_ranks(directory, name, "save") for name in layouts}}
    results["load"] = {}
    for target in layouts:
        ranks = run_ranks(directory, target, "load", *layouts)
        for number, source in enumerate(layouts):
            results["load"][f"{source} -> {target}"] = [seen[number] for seen in ranks]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
