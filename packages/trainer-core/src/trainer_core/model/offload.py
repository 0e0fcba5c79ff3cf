"""Keep saved activations in host memory between the forward and the backward pass."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import TrainingArguments

SETTING = "enable_activation_offloading"
MIN_BYTES = 1 << 20
"""Tensors below one MiB stay: they cost a copy each and free little."""


def activation_offload(args: TrainingArguments, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a training run in which saved activations go to host memory.

    Args:
        args: enable_activation_offloading.
        device: Where the model computes.

    Raises:
        ConfigurationError: If it is asked for on the CPU.
    """
    if not args.enable_activation_offloading:
        return nullcontext()
    check_activation_offload(device)
    return ActivationOffload(device)


def check_activation_offload(device: torch.device) -> None:
    """Refuse activation offload where activations are in host memory anyway.

    Raises:
        ConfigurationError: On the CPU.
    """
    if device.type == "cpu":
        raise ConfigurationError(
            SETTING,
            True,
            "has no effect on the CPU, where activations are in host memory anyway",
            "leave it out",
        )


class ActivationOffload(AbstractContextManager[None]):
    """Context in which saved activations are copied to host memory, and back when backward needs them.

    Copies are queued on the current stream, from and to page-locked memory, so that the host waits for
    nothing. A tensor that several operations save is copied once. What stays on the device: parameters and
    views of them, small tensors, and views that spread a small tensor over a large shape. With activation
    checkpointing, what is saved, and so copied, are the inputs of the blocks.

    Args:
        device: Device whose tensors are copied.
        min_bytes: Size of the smallest tensor that is copied.
    """

    def __init__(self, device: torch.device, *, min_bytes: int = MIN_BYTES) -> None:
        self._device_type = device.type
        self._min_bytes = min_bytes
        self._copies: weakref.WeakValueDictionary[object, _HostCopy] = weakref.WeakValueDictionary()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor | _HostCopy:
        if tensor.device.type != self._device_type or not worth_offloading(tensor, self._min_bytes):
            return tensor
        # The weak reference keeps the address from being used again, so an equal key means the same memory.
        key = (
            StorageWeakRef(tensor.untyped_storage()),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = _HostCopy(tensor)
        return copy


def worth_offloading(tensor: Tensor, min_bytes: int) -> bool:
    """Whether a saved tensor is an activation that is large enough to be copied to the host."""
    size = tensor.numel() * tensor.element_size()
    if size < min_bytes or type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    if isinstance(tensor._base, nn.Parameter):
        return False
    return tensor.untyped_storage().nbytes() >= size


class _HostCopy:
    """A tensor in host memory that goes back to its device when it is asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        pinned = tensor.device.type != "cpu"
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        self._host.copy_(tensor.detach(), non_blocking=pinned)
        self._returned: weakref.ref[Tensor] | None = None

    def on_device(self) -> Tensor:
        """The tensor on its device; the same one while somebody still uses it."""
        tensor = None if self._returned is None else self._returned()
        if tensor is None:
            tensor = torch.empty_like(self._host, device=self._device, pin_memory=False)
            tensor.copy_(self._host, non_blocking=True)
            self._returned = weakref.ref(tensor)
        return tensor


def _unpack(packed: Tensor | _HostCopy) -> Tensor:
    return packed.on_device() if isinstance(packed, _HostCopy) else packed
