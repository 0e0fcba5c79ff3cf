"""What the scenarios of two ranks have in common: state that can fail, limits, and notes of what happens."""

import logging
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    Preprocessor,
    SharingPattern,
    StateComponent,
    Stateful,
)
from checkpoint_core.manifest import verify_checkpoint
from dist_env import StaticDistributedEnvironment

TIMEOUT = 60.0
ELEMENTS = 100_000
"""Of a sharded tensor; each rank holds 200 kB of it."""


class State:
    """State that a scenario gives, and that can be made to fail."""

    def __init__(self, **values: object) -> None:
        self.values: dict[str, object] = values
        self.on_save: Callable[[], None] = lambda: None
        self.on_load: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, object]:
        self.on_save()
        return dict(self.values)

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.on_load()
        self.values = dict(state)


class Broken:
    """A tokenizer that cannot be saved."""

    def save_pretrained(self, directory: str) -> None:
        raise RuntimeError("it has no vocabulary")


def component(key: str, stateful: Stateful, pattern: SharingPattern, **fields: bool) -> StateComponent:
    return StateComponent(key=key, stateful=stateful, sharing_pattern=pattern, **fields)


def fail_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def stage(**layers: int) -> nn.ModuleDict:
    """A part of a model: linear layers of 2 inputs, by name and number of outputs."""
    return nn.ModuleDict({name: nn.Linear(2, outputs) for name, outputs in layers.items()})


def address_space() -> int:
    """Bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


class _Warnings(logging.Handler):
    """Collects warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("checkpoint_core").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Ranks(ABC):
    """One of two ranks. Subclasses have the scenarios, which both run in the same order.

    Args:
        rank: The rank.
        directory: For everything that is written.
        nodes: 1 when both ranks are on one node, 2 when each is on its own.
    """

    def __init__(self, rank: int, directory: Path, *, nodes: int = 1) -> None:
        self.rank = rank
        self.directory = directory
        self.seen: dict[str, dict[str, object]] = {}
        self.warnings = _Warnings()
        size = 2 // nodes
        self.env = StaticDistributedEnvironment(
            rank=rank, local_rank=rank % size, world_size=2, local_world_size=size, backend="gloo"
        )
        self.mesh = init_device_mesh("cpu", (2,))

    @abstractmethod
    def scenarios(self) -> None:
        """What the ranks do, one after the other."""

    def manager(
        self,
        components: Sequence[StateComponent],
        directory: Path,
        *,
        preprocessor: Preprocessor | None = None,
        **settings: object,
    ) -> CheckpointManager:
        values = {"timeout_seconds": TIMEOUT, "save_total_limit": None, **settings}
        config = CheckpointConfig(output_dir=directory, **values)  # type: ignore[arg-type]
        return CheckpointManager(
            config, dist=self.env, stateful_provider=components, preprocessor=preprocessor
        )

    def attempt(self, name: str, action: Callable[[], object], directory: Path) -> None:
        """Note what an action raises, how long it takes, and what the directory holds afterwards."""
        self.warnings.texts.clear()
        message, passes = None, False
        began = time.monotonic()
        try:
            action()
        except CheckpointError as error:
            message, passes = str(error), error.may_pass
        except Exception as error:  # noqa: BLE001 - the test tells which scenario it was
            message = f"not a CheckpointError: {error!r}"
        seconds = time.monotonic() - began
        dist.barrier()
        if self.rank == 0:
            for path in directory.glob("checkpoint-*"):
                verify_checkpoint(path, checksums=True)
        self.seen[name] = {
            "message": message,
            "may_pass": passes,
            "seconds": seconds,
            "left": sorted(path.name for path in directory.iterdir()),
            "warnings": list(self.warnings.texts),
        }
        dist.barrier()

    @contextmanager
    def limit_on(self, rank: int, which: int, value: int) -> Iterator[None]:
        """A resource limit of one rank for a while."""
        soft, hard = resource.getrlimit(which)
        resource.setrlimit(which, (value if self.rank == rank else soft, hard))
        try:
            yield
        finally:
            resource.setrlimit(which, (soft, hard))

    def sharded(self, elements: int = ELEMENTS) -> DTensor:
        return distribute_tensor(torch.arange(float(elements)), self.mesh, [Shard(0)])
