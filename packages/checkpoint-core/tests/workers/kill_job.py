"""The job that is killed: one or two ranks that load the newest checkpoint and then save without end.

Every tensor and every number of a save says the same value, which no other save of the run has, so that a
mixture of two saves shows.
"""

import itertools
import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
)
from checkpoint_core.directory import checkpoint_directories
from dist_env import StaticDistributedEnvironment

SAVE_TOTAL_LIMIT = 3
MAX_SHARD_SIZE = 6000
"""Divides the weights into two files."""
NOT_TO_BE_SAVED = -1
"""What the live state says while an asynchronous save writes its copy."""
REFUSED_EXIT = 3

P = SharingPattern


@dataclass(frozen=True)
class Mode:
    """What kind of job."""

    ranks: int = 1
    nodes: bool = False
    """Each rank is a node with a directory of its own."""
    divided: bool = False
    """Whether those nodes keep one checkpoint together, each a part."""
    one_writer: bool | None = None
    """Whether each file is written by one rank; None as the manager decides."""


MODES = {
    "one": Mode(),
    "async": Mode(),
    "two-ranks": Mode(ranks=2),
    "one-writer": Mode(ranks=2, one_writer=True),
    "nodes": Mode(ranks=2, nodes=True),
    "parts": Mode(ranks=2, nodes=True, divided=True),
}


@dataclass(frozen=True)
class Life:
    """One start of the job, until it is killed."""

    mode: Mode
    directory: Path
    asynchronous: bool
    first_value: int
    """The value of its first save; the later ones count up."""
    timeout_seconds: float
    endless: bool = True
    """Continues until killed; otherwise it ends after one save."""

    def output_dir(self, rank: int) -> Path:
        """Where a rank saves."""
        return self.directory / f"node{rank}" if self.mode.nodes else self.directory / "run"

    def output_dirs(self) -> list[Path]:
        """All directories, by rank of their leader."""
        return [self.output_dir(rank) for rank in range(self.mode.ranks if self.mode.nodes else 1)]


class Marked:
    """State of which everything says one value."""

    def __init__(self, size: int, name: str = "tensor") -> None:
        self.value: object = 0
        self.name = name
        self.tensors = {name: torch.zeros(size), f"{name}.ints": torch.zeros(size // 10, dtype=torch.int64)}

    def fill(self, value: int) -> None:
        self.value = value
        for tensor in self.tensors.values():
            tensor.fill_(value)

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value, "list": [{"again": self.value}], "tensors": dict(self.tensors)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        stored = state["tensors"]
        assert isinstance(stored, dict)
        # A SHARDED state comes back with the tensors of all ranks.
        self.tensors = {name: stored[name] for name in self.tensors}
        self.value = state["value"]

    def values(self) -> set[float]:
        return values_in([self.value, self.tensors])


def values_in(node: object) -> set[float]:
    """All numbers in a state."""
    if isinstance(node, torch.Tensor):
        return {float(node.min()), float(node.max())}
    if isinstance(node, dict):
        return values_in(list(node.values()))
    if isinstance(node, list):
        return {value for item in node for value in values_in(item)}
    return {float(str(node))}


class Job:
    """The objects of one rank."""

    def __init__(self, life: Life, rank: int) -> None:
        # On shared storage the ranks hold different stages; a node that saves for itself needs all of them.
        divided = life.mode.ranks > 1 and (life.mode.divided or not life.mode.nodes)
        stages = [rank] if divided else [0, 1]
        self.model = nn.ModuleDict({f"stage{stage}": nn.Linear(32, 32) for stage in stages})
        self.shared, self.main, self.own = Marked(50_000), Marked(10), Marked(1000)
        self.stage = Marked(2000, f"stage{rank}" if divided else "stages")
        parts = P.SHARDED if divided else P.REPLICATED
        declared = [
            ("model", ModelState(self.model), parts),
            ("shared", self.shared, P.REPLICATED),
            ("main", self.main, P.GLOBAL),
            ("own", self.own, P.PER_RANK),
            ("stage", self.stage, parts),
        ]
        self.manager = CheckpointManager(
            CheckpointConfig(
                output_dir=life.output_dir(rank),
                save_total_limit=SAVE_TOTAL_LIMIT,
                max_shard_size=MAX_SHARD_SIZE,
                timeout_seconds=life.timeout_seconds,
                save_on_each_node=life.mode.nodes,
                one_writer_per_file=life.mode.one_writer,
                async_save=life.asynchronous,
            ),
            dist=environment(life.mode, rank),
            stateful_provider=[
                StateComponent(key=key, stateful=stateful, sharing_pattern=pattern, required=True)
                for key, stateful, pattern in declared
            ],
        )

    def fill(self, value: int) -> None:
        """Train: change all state in place."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
        for state in (self.shared, self.main, self.own, self.stage):
            state.fill(value)

    def values(self) -> set[float]:
        """What the state says; one value, unless it is a mixture."""
        found = values_in([parameter.detach() for parameter in self.model.parameters()])
        return found.union(*(state.values() for state in (self.shared, self.main, self.own, self.stage)))


def environment(mode: Mode, rank: int) -> StaticDistributedEnvironment:
    local = mode.ranks > 1 and not mode.nodes
    return StaticDistributedEnvironment(
        rank=rank,
        local_rank=rank if local else 0,
        world_size=mode.ranks,
        local_world_size=mode.ranks if local else 1,
        backend="gloo" if mode.ranks > 1 else None,
    )


def run_rank(life: Life, rank: int, pipe: int) -> NoReturn:
    """Run one rank in a process of its own, which ends here; what it does goes into the pipe."""

    def report(kind: str, **details: object) -> None:
        # Short enough to be written at once, whatever the other rank writes.
        os.write(pipe, (json.dumps({"kind": kind, "rank": rank, **details}) + "\n").encode())

    status = 1
    try:
        if life.mode.ranks > 1:
            open_group(life, rank)
        job = Job(life, rank)
        for kind, details in work(job, life):
            report(kind, **details)
        job.manager.close()
        status = 0
    except CheckpointError as error:
        report("refused", message=str(error)[:2000], at=time.monotonic())
        status = REFUSED_EXIT
    except BaseException:  # noqa: BLE001 - the driver prints it
        report("crashed", message=traceback.format_exc()[-3000:])
    finally:
        os._exit(status)


def open_group(life: Life, rank: int) -> None:
    store = dist.FileStore(str(life.directory / f"store-{life.first_value}"), life.mode.ranks)
    timeout = timedelta(seconds=life.timeout_seconds)
    dist.init_process_group("gloo", rank=rank, world_size=life.mode.ranks, store=store, timeout=timeout)


def work(job: Job, life: Life) -> Iterator[tuple[str, dict[str, object]]]:
    """Load, then save every step twice, so that replacing happens too.

    Yields:
        Each event as it happens: ``loaded``, then ``begun`` and ``done`` around every save, and ``tidy``
        behind the first one.
    """
    job.fill(0)
    loaded = job.manager.load_checkpoint()
    yield "loaded", {"values": sorted(job.values()), "step": loaded.step if loaded else None}
    # Every other life begins by replacing the checkpoint from which it resumed.
    begin = 2 * (loaded.step if loaded else 0) + life.first_value % 2 + 1
    for count in itertools.count():
        value, step = life.first_value + count, (begin + count) // 2
        job.fill(value)
        yield "begun", {"value": value, "step": step}
        path = job.manager.save_checkpoint(step, metrics={"eval_loss": value})
        if life.asynchronous:
            job.fill(NOT_TO_BE_SAVED)
            job.manager.wait()
        yield "done", {"value": value, "step": step}
        if count == 0:
            hidden = [item.name for item in path.parent.iterdir() if item.name.startswith(".")]
            kept = [step for step, _ in checkpoint_directories(path.parent)]
            yield "tidy", {"hidden": hidden, "kept": kept}
            if not life.endless:
                return
