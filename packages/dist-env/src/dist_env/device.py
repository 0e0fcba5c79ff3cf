"""Which device this process uses, and which backend serves it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from dist_env.errors import DistributedEnvironmentError

DeviceMap = Mapping[int, int] | Sequence[int]

_VISIBILITY = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}


def choose_device(
    rank: int, local_rank: int, *, device_map: DeviceMap | None = None, no_accelerator: bool = False
) -> torch.device:
    """The device of a rank. Nothing is set and no device context is made.

    Args:
        rank: Global rank, the key of `device_map`.
        local_rank: Index of the accelerator when there is no map.
        device_map: Accelerator index by global rank.
        no_accelerator: Use the CPU although an accelerator is there.

    Returns:
        `cpu`, or the accelerator with its index.

    Raises:
        DistributedEnvironmentError: The map has no entry for this rank, or the index is not among the
            visible devices.
    """
    if no_accelerator or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    index = local_rank if device_map is None else _mapped_index(device_map, rank)
    check_visible(
        index,
        torch.accelerator.device_count(),
        kind=accelerator.type,
        rank=rank,
        mapped=device_map is not None,
    )
    return torch.device(accelerator.type, index)


def _mapped_index(device_map: DeviceMap, rank: int) -> int:
    try:
        index = device_map[rank]
    except (KeyError, IndexError):
        raise DistributedEnvironmentError(
            f"device_map has no entry for global rank {rank}. Give one accelerator index for each rank."
        ) from None
    if isinstance(index, bool) or not isinstance(index, int):
        raise DistributedEnvironmentError(f"device_map[{rank}]={index!r} is not an integer device index.")
    return index


def check_visible(index: int, count: int, *, kind: str, rank: int, mapped: bool) -> None:
    """Refuse an accelerator index beyond the visible devices.

    Args:
        index: Wanted device index.
        count: Number of visible devices.
        kind: Device type, for the message.
        rank: Global rank, for the message.
        mapped: Whether the index came from `device_map` (else from `LOCAL_RANK`).

    Raises:
        DistributedEnvironmentError: Names `LOCAL_RANK` or the `device_map` entry, and the visible devices.
    """
    if 0 <= index < count:
        return
    limits = [f"{name}={os.environ[name]}" for name in _VISIBILITY.get(kind, ()) if name in os.environ]
    shown = f" ({', '.join(limits)})" if limits else ""
    if mapped:
        raise DistributedEnvironmentError(
            f"device_map[{rank}]={index} is beyond the visible {kind} devices, "
            f"which are 0..{count - 1}{shown}."
        )
    raise DistributedEnvironmentError(
        f"LOCAL_RANK={index} is beyond the visible {kind} devices, which are 0..{count - 1}{shown}. Start "
        f"at most {count} processes on this host, make more devices visible, give a device_map, or pass "
        "no_accelerator=True."
    )


def set_current_device(device: torch.device) -> None:
    """Make an accelerator the current device; the CPU needs no such thing."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what it was asked to; the CPU has done it already."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_identity(device: torch.device) -> str | None:
    """An identifier of the physical accelerator, where the driver gives one."""
    if device.type != "cuda":
        return None
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", None))


def choose_backend(device: torch.device, backend: str | None) -> str | None:
    """The collective backend: the given one, else the one PyTorch registers for the device type.

    Args:
        device: Device of this process.
        backend: A backend name such as `gloo`, or pairs such as `cpu:gloo,cuda:nccl`; None chooses.

    Returns:
        The backend; None only when none was asked for and this build of torch has no torch.distributed.

    Raises:
        DistributedEnvironmentError: The backend is not in this build of torch, or cannot serve the device.
    """
    if not dist.is_available():
        if backend is not None:
            raise DistributedEnvironmentError(
                f"backend={backend!r} cannot be used, because this build of torch lacks torch.distributed."
            )
        return None
    if backend is None:
        return dist.get_default_backend_for_device(device)
    served = _parse_backend(backend, device)
    for kind, name in served.items():
        _check_backend(backend, kind, name)
    if device.type not in served:
        raise DistributedEnvironmentError(
            f"backend={backend!r} names no backend for the device {device.type} of this rank. Add "
            f"{device.type}:{dist.get_default_backend_for_device(device)}."
        )
    return backend


def _check_backend(backend: str, kind: str, name: str) -> None:
    if name in dist.Backend.backend_list and kind not in dist.Backend.backend_capability.get(name, [kind]):
        raise DistributedEnvironmentError(
            f"backend={backend!r} names {name}, which cannot serve the device {kind}. Use "
            f"{dist.get_default_backend_for_device(kind)}, or leave backend out."
        )
    known = [b for b in dist.Backend.backend_list if b != "undefined" and dist.is_backend_available(b)]
    if name not in known:
        raise DistributedEnvironmentError(
            f"backend={backend!r} names {name!r}, which this build of torch does not have. Use one of "
            f"{', '.join(known)}."
        )


def _parse_backend(backend: str, device: torch.device) -> dict[str, str]:
    """Device type to backend name."""
    if ":" not in backend:
        return {device.type: backend.strip().lower()}
    pairs: dict[str, str] = {}
    for part in backend.split(","):
        kind, colon, name = part.partition(":")
        if not colon or not kind.strip() or not name.strip():
            raise DistributedEnvironmentError(
                f"backend={backend!r} is neither a name nor pairs such as 'cpu:gloo,cuda:nccl'."
            )
        pairs[kind.strip().lower()] = name.strip().lower()
    return pairs
