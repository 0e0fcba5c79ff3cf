"""A job of which only this process exists, to see what one rank of a large job would do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch.distributed as dist

from dist_env.errors import DistributedEnvironmentError
from dist_env.interface import IMAGINED, DistributedEnvInterface, StaticDistributedEnvironment


@contextmanager
def imagined_job(
    world_size: int,
    *,
    local_world_size: int | None = None,
    rank: int = 0,
    process_group: bool | None = None,
) -> Iterator[DistributedEnvInterface]:
    """A context in which this process is one rank of a job whose other ranks are imagined.

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
        backend=IMAGINED if has_group else None,
    )
    if not has_group:
        yield env
        return
    if not dist.is_available():
        raise DistributedEnvironmentError(
            f"world_size={world_size} ranks need torch.distributed, which this build of torch lacks: install "
            "a build that has it."
        )
    if dist.is_initialized():
        raise DistributedEnvironmentError(
            f"world_size={world_size} ranks cannot be imagined beside the process group that exists: "
            "do it before it is made, or in another process."
        )
    # The first one registers the backend; torch keeps it among its tools for tests.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from torch._C._distributed_c10d import HashStore

    tell = sys.excepthook
    dist.init_process_group(IMAGINED, store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield env
    finally:
        # torch marks what a rank says of its end with its number, and this process is none.
        sys.excepthook = tell
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Drop what DTensor keeps of operators: results would come on the mesh of another rank of a like job.

    A mesh of the same shape is equal to that of another rank, and so found there, but names other groups.
    Private in torch 2.11 to 2.13, and without a public equal; checked by test_imagined.py.
    """
    if "torch.distributed.tensor" in sys.modules:
        import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
