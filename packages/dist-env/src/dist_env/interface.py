"""What the other packages need to know about where they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist

from dist_env.errors import DistributedEnvironmentError

FAKE_BACKEND = "fake"
"""Backend of torch whose collectives return at once: the other ranks do not exist."""


@runtime_checkable
class DistributedEnvInterface(Protocol):
    """Where this process stands in the job. Any object with these attributes will do."""

    @property
    def rank(self) -> int:
        """Global rank, 0 <= rank < world_size."""
        ...

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this host, 0 <= local_rank < local_world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        ...

    @property
    def local_world_size(self) -> int:
        """Number of processes of the job on this host."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of this process, with an index for accelerators (`cuda:0`), without for `cpu`."""
        ...

    @property
    def device_type(self) -> str:
        """`device.type`: `cpu`, `cuda`, `xpu`, ..."""
        ...

    @property
    def backend(self) -> str | None:
        """Name of the collective backend (`gloo`, `nccl`, ...), or None without torch.distributed."""
        ...


@dataclass(frozen=True, kw_only=True)
class StaticDistributedEnvironment:
    """Plain values, no process group: one CPU process unless told otherwise.

    For single-process programs, for tests, and for programs that formed their process group themselves.

    Args:
        rank: Global rank.
        local_rank: Rank on this host.
        world_size: Number of processes.
        local_world_size: Number of processes on this host.
        device: Device of this process; a string such as `"cuda:0"` is accepted.
        backend: Name of the backend of an existing group, if there is one.

    Raises:
        DistributedEnvironmentError: The numbers contradict one another.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device))
        check_ranks(self.rank, self.local_rank, self.world_size, self.local_world_size)

    @property
    def device_type(self) -> str:
        """`device.type`."""
        return self.device.type

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""


@contextmanager
def fake_job(
    world_size: int,
    *,
    local_world_size: int | None = None,
    rank: int = 0,
    process_group: bool | None = None,
) -> Iterator[DistributedEnvInterface]:
    """A context in which this process is one rank of a job whose other ranks do not exist.

    It has a process group of torch's backend `fake`: meshes and groups of any size can be made, and
    collectives return at once and move nothing. What this package offers (`barrier`, `gather_objects`, ...)
    does as if the others had the same to say. It computes on the CPU.

    Args:
        world_size: Number of ranks, this one included.
        local_world_size: Ranks on this host; all of them by default.
        rank: This one.
        process_group: Whether there is a process group; by default if there are several ranks.

    Yields:
        The environment of the rank.

    Raises:
        DistributedEnvironmentError: There is a process group already, or the numbers contradict one another.
    """
    on_a_host = local_world_size or world_size
    has_group = world_size > 1 if process_group is None else process_group
    env = StaticDistributedEnvironment(
        rank=rank,
        local_rank=rank % on_a_host,
        world_size=world_size,
        local_world_size=on_a_host,
        backend=FAKE_BACKEND if has_group else None,
    )
    if not has_group:
        yield env
        return
    if not dist.is_available():
        raise DistributedEnvironmentError(
            f"world_size={world_size} needs torch.distributed, which this build of torch lacks. Install a "
            "build that has it."
        )
    if dist.is_initialized():
        raise DistributedEnvironmentError(
            f"world_size={world_size} cannot be faked beside the process group that exists. Call fake_job "
            "before it is made, or in another process."
        )
    # The first one registers the backend; torch keeps it among its tools for tests.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from torch._C._distributed_c10d import HashStore

    tell = sys.excepthook
    dist.init_process_group(FAKE_BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield env
    finally:
        # torch marks what a rank says of its end with its number, and this process is none.
        sys.excepthook = tell
        dist.destroy_process_group()
        forget_meshes()


def is_alone(env: DistributedEnvInterface) -> bool:
    """Whether no other process takes part: the job is one process, or its other ranks are fake."""
    return env.world_size == 1 or env.backend == FAKE_BACKEND


def check_ranks(rank: int, local_rank: int, world_size: int, local_world_size: int) -> None:
    """Refuse rank numbers that are out of range or contradict one another.

    Raises:
        DistributedEnvironmentError: Names the variable, its value and the rule.
    """
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    for name, value in values.items():
        least = 1 if name.endswith("SIZE") else 0
        if value < least:
            raise DistributedEnvironmentError(f"{name}={value} must be {least} or more.")
    for part, whole in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values[part] >= values[whole]:
            raise DistributedEnvironmentError(
                f"{part}={values[part]} contradicts {whole}={values[whole]}, because {part} must be less "
                f"than {whole}. Set both, or start the job with torchrun."
            )
    if local_world_size > world_size:
        raise DistributedEnvironmentError(
            f"LOCAL_WORLD_SIZE={local_world_size} contradicts WORLD_SIZE={world_size}, because a host "
            "cannot run more processes than the job has. Set both, or start the job with torchrun."
        )


def forget_meshes() -> None:
    """Drop what DTensor keeps of operators, and with it the meshes and groups of a job that has ended.

    A mesh of the same shape is equal to that of another rank or job, and so found there, but names other
    groups. And each group of gloo that is kept has a thread that wakes a hundred times a second.
    Private in torch 2.11 to 2.13, and without a public equal; checked by test_fake_job.py and test_meshes.py.
    """
    if "torch.distributed.tensor" in sys.modules:
        # What `torch.distributed.tensor.debug._clear_sharding_prop_cache()` does; that module needs NumPy.
        dispatcher: Any = import_module("torch.distributed.tensor").DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        clear_fast_path: Any = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
        if clear_fast_path is not None:
            clear_fast_path()
        for module, name in _CACHES_OF_MESHES:
            kept: Any = import_module(f"torch.distributed.tensor.{module}")
            for part in name.split("."):
                kept = getattr(kept, part, None)
            clear = getattr(kept, "cache_clear", kept)
            if clear is not None:
                clear()


_CACHES_OF_MESHES = (
    ("_collective_utils", "MeshTopoInfo.build_from_mesh"),
    ("_redistribute", "_gen_transform_infos"),
    ("_redistribute", "clear_redistribute_planner_cache"),
)
"""Not all of them are in each of these releases."""
