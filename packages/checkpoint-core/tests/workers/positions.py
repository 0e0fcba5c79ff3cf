"""Positions in data, saved and loaded by 1, 2 and 4 ranks under every pattern. Usage: positions.py DIRECTORY.

Prints what every rank saw. Ranks are forked, so that torch is imported once.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    SharingPattern,
    StateComponent,
)
from dist_env import StaticDistributedEnvironment

WORLDS = (1, 2, 4)
PATTERNS = (SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.PER_RANK)
ITEMS = list(range(37))


class Position:
    """What is left of some items; states can only be loaded as they were saved."""

    def __init__(self, left: Sequence[int]) -> None:
        self.left = list(left)
        self.took: object = None

    def state_dict(self) -> dict[str, object]:
        return {"left": list(self.left), "marks": torch.tensor(self.left)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._take([state], "plain")

    def _take(self, states: Sequence[dict[str, object]], took: object) -> None:
        lists = [state["left"] for state in states]
        if lists != [state["marks"].tolist() for state in states]:
            raise ValueError("a state has the tensor of another one")
        self.left = sorted(item for left in lists for item in left)
        self.took = took


class Divisible(Position):
    """A position whose states can be distributed anew."""

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        self._take(states, [len(states), rank, world_size])
        self.left = self.left[rank::world_size]


class AtTimes(Position):
    """Looks divisible to whoever asks the class."""

    @property
    def load_resharded(self) -> Callable[..., None]:
        raise AttributeError("not this one")


class Failing(Divisible):
    """Takes nothing."""

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        raise RuntimeError("does not like it")


class Ranks:
    """One rank of a job."""

    def __init__(self, rank: int, world: int, directory: Path) -> None:
        self.rank, self.world, self.directory = rank, world, directory
        self.env = StaticDistributedEnvironment(
            rank=rank, local_rank=rank, world_size=world, local_world_size=world
        )

    def manager(self, run: str, pattern: SharingPattern, *stateful: Position) -> CheckpointManager:
        """Of a component that is said to be ``pattern``, behind one that always loads."""
        first = StateComponent(
            key="first", stateful=self.first, sharing_pattern=SharingPattern.REPLICATED, required=True
        )
        parts = [StateComponent(key="data", stateful=each, sharing_pattern=pattern) for each in stateful]
        config = CheckpointConfig(output_dir=self.directory / run, timeout_seconds=60)
        return CheckpointManager(config, dist=self.env, stateful_provider=[first, *parts])

    def save(self) -> None:
        self.first = Position([1])
        for pattern in PATTERNS:
            own = pattern is SharingPattern.PER_RANK
            left = ITEMS[self.rank :: self.world] if own else ITEMS
            with self.manager(f"{pattern.value}{self.world}", pattern, Divisible(left)) as manager:
                manager.save_checkpoint(1)

    def load(self) -> dict[str, object]:
        seen: dict[str, object] = {}
        for world in WORLDS:
            for saved in PATTERNS:
                for wanted in PATTERNS if saved is SharingPattern.PER_RANK else [SharingPattern.PER_RANK]:
                    name = f"{saved.value}{world} -> {wanted.value}"
                    seen[name] = self.take(f"{saved.value}{world}", wanted, Divisible([]))
        for kind in (Position, AtTimes):
            seen[f"{kind.__name__}, one for each"] = self.take("global2", SharingPattern.PER_RANK, kind([]))
            seen[f"{kind.__name__}, one for all"] = self.take("per_rank2", SharingPattern.GLOBAL, kind([]))
        seen["failing on rank 1"] = self.take(
            "per_rank2", SharingPattern.GLOBAL, (Failing if self.rank == 1 else Divisible)([])
        )
        seen["other kind on rank 1"] = self.take(
            "per_rank2", SharingPattern.GLOBAL, (Position if self.rank == 1 else Divisible)([])
        )
        seen["on rank 0 only"] = self.take(
            "per_rank4", SharingPattern.GLOBAL, *([Divisible([])] if self.rank == 0 else [])
        )
        return seen | self.damaged()

    def damaged(self) -> dict[str, object]:
        part = self.directory / "per_rank2" / "checkpoint-1" / "data.rank1.safetensors"
        whole = part.read_bytes()
        self.meet()
        if self.rank == 0:
            part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        self.meet()
        seen = {"flipped": self.take("per_rank2", SharingPattern.GLOBAL, Divisible([]), named=True)}
        self.meet()
        if self.rank == 0:
            part.unlink()
        self.meet()
        seen["deleted"] = self.take("per_rank2", SharingPattern.GLOBAL, Divisible([]))
        self.meet()
        if self.rank == 0:
            part.write_bytes(whole)
        self.meet()
        return seen

    def meet(self) -> None:
        if self.world > 1:
            dist.barrier()

    def take(self, run: str, pattern: SharingPattern, *stateful: Position, named: bool = False) -> object:
        self.first = Position([])
        with self.manager(run, pattern, *stateful) as manager:
            try:
                path = self.directory / run / "checkpoint-1" if named else None
                missing = manager.load_checkpoint(path).missing
            except CheckpointError as error:
                return {"error": str(error), "first": self.first.left, "left": [p.left for p in stateful]}
        return {"missing": missing, "left": [p.left for p in stateful], "took": [p.took for p in stateful]}


def run_ranks(directory: Path, world: int, action: str) -> list[object]:
    """Fork the ranks of a job, and gather what they saw."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os._exit(_run_rank(directory, world, rank, action))
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(f"{action} on {world}: ranks ended with {statuses}")
    return [json.loads((directory / f"{action}{world}.{rank}").read_text()) for rank in range(world)]


def _run_rank(directory: Path, world: int, rank: int, action: str) -> int:
    try:
        if world > 1:
            store = dist.FileStore(str(directory / f"{action}{world} store"), world)
            limit = timedelta(seconds=90)
            dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
        seen = getattr(Ranks(rank, world, directory), action)()
        (directory / f"{action}{world}.{rank}").write_text(json.dumps(seen))
        if world > 1:
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - a rank reports by its exit status
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    logging.getLogger("checkpoint_core").setLevel(logging.ERROR)
    for world in WORLDS:
        run_ranks(directory, world, "save")
    print(json.dumps({world: run_ranks(directory, world, "load") for world in WORLDS}))


if __name__ == "__main__":
    main()
