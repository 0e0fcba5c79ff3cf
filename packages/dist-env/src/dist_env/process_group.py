"""Forming and closing the default process group."""

from __future__ import annotations

import ctypes
import gc
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dist_env.logging import get_logger

if TYPE_CHECKING:
    from dist_env.stores import Store

logger = get_logger("dist_env")


def form_group(
    store: Store,
    *,
    rank: int,
    world_size: int,
    backend: str | None,
    device: torch.device,
    timeout: float,
) -> None:
    """Form the default group over an open store.

    Args:
        store: Store that all ranks share.
        rank: Global rank.
        world_size: Number of ranks.
        backend: Backend name or pairs.
        device: Device of this rank; accelerators are bound to the group.
        timeout: Seconds that forming the group may take.
    """
    # Binding the device lets the backend connect at once and keeps barriers on the right device.
    bound = device if "ccl" in (backend or "") else None
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=bound,
    )


def set_group_timeout(timeout: float) -> None:
    """Set the timeout of later collectives of the default group; warns where the backend cannot do that.

    Args:
        timeout: Seconds.
    """
    group = dist.group.WORLD
    if group is None:
        return
    try:
        group.set_timeout(timedelta(seconds=timeout))
    except RuntimeError as error:
        # The debug wrapper of torch 2.11 (TORCH_DISTRIBUTED_DEBUG=DETAIL), for one.
        logger.warning(
            "training_timeout=%g s cannot be set, so that collectives keep init_timeout: %s", timeout, error
        )


def close_group() -> None:
    """Destroy the default group and every group made from it.

    Whatever still holds a group keeps the backend's threads alive, and gloo then aborts the interpreter on
    its way out. Reducers and hooks hold groups in reference cycles, so these are collected first.
    """
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def abandon_group() -> None:
    """Let go of the default group while other ranks may never answer again.

    Destroying a gloo group waits for pending collectives, and thus for ranks that wait for this one. The
    backend objects are kept alive on purpose, so that this process can end at once with its own message;
    accelerator backends are told to abort instead.
    """
    group = dist.group.WORLD
    if group is None:
        return
    group.abort()
    for held in list(dist.distributed_c10d._world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    dist.destroy_process_group()
