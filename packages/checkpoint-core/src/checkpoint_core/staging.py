"""Host memory that every asynchronous save copies its tensors into.

New memory is slow: the operating system hands out each page at its first touch, which takes several times as
long as the copy. So the memory is kept from save to save.
"""

import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from checkpoint_core.errors import CheckpointError
from checkpoint_core.threads import InterruptSafeEvent

ALIGNMENT = 64
"""Every staged tensor begins at a multiple of this many bytes: a cache line, the widest vector register."""

_K = TypeVar("_K")
_logger = logging.getLogger(__name__)
_HUGE_PAGE = 2 * 1024 * 1024
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
"""MADV_WIPEONFORK of linux/mman.h, which the mmap module does not name."""
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices, not only for the current one.


class StagingBuffer:
    """Memory for copies of tensors, allocated once and used again by every copy.

    It grows when it must and never shrinks. The copies of one :meth:`copy` are overwritten by the next, so
    the caller waits until they are no longer needed. For one thread at a time.
    """

    def __init__(self) -> None:
        self._region: _Region | None = None
        self._told = False

    @property
    def capacity(self) -> int:
        """Bytes allocated; 0 before the first :meth:`copy`, and in a forked child."""
        region = self._current()
        return 0 if region is None else region.bytes.numel()

    def copy(self, tensors: Mapping[_K, torch.Tensor]) -> dict[_K, torch.Tensor]:
        """Copy tensors into the buffer.

        Tensors of an accelerator are copied asynchronously, with one synchronisation of the device at the
        end. Two names for the same memory become two copies.

        Args:
            tensors: Dense tensors of any device, dtype, shape and strides, by any key.

        Returns:
            CPU tensors of the same dtypes and shapes by the same keys: contiguous, detached, 64-byte aligned,
            without pending conjugation or negation. They are views of the buffer, valid until the next copy.

        Raises:
            CheckpointError: A tensor that is sparse, quantized or on the meta device, or the system refuses
                the memory.
        """
        for key, tensor in tensors.items():
            _check_dense(key, tensor)
        region = self._region_for(sum(_padded_bytes(tensor) for tensor in tensors.values()))
        # Copies to the host can only overlap on the devices that can be synchronised afterwards.
        accelerator = torch.accelerator.current_accelerator()
        devices = {
            tensor.device
            for tensor in tensors.values()
            if accelerator is not None and tensor.device.type == accelerator.type
        }
        for device in devices:
            region.ensure_pinned(device)
        staged: dict[_K, torch.Tensor] = {}
        offset = 0
        try:
            for key, tensor in tensors.items():
                staged[key] = region.place(tensor, offset, non_blocking=tensor.device in devices)
                offset += _padded_bytes(tensor)
        finally:
            # After an error as well: nothing may still write to the buffer when the caller uses it again.
            for device in devices:
                torch.accelerator.synchronize(device)
        return staged

    def release(self) -> None:
        """Give the memory back. Staged tensors that are still referenced keep theirs."""
        self._region = None

    def _region_for(self, size: int) -> "_Region":
        region = self._current()
        if region is None or region.bytes.numel() < size:
            self._tell_growth(size)
            self.release()
            region = self._region = _Region(size)
        return region

    def _tell_growth(self, size: int) -> None:
        if size and not self._told:
            self._told = True
            _logger.info(
                "the staging buffer grows from %d to %d bytes; this save takes longer, because new memory is "
                "slow at its first use",
                self.capacity,
                size,
            )

    def _current(self) -> "_Region | None":
        # A forked child finds the memory wiped, and its CUDA context gone.
        if self._region is not None and self._region.owner != os.getpid():
            self._region = None
        return self._region


class _HostMemory(mmap.mmap):
    """Anonymous memory of this process, which undoes its pinning before it is given back."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


class _Region:
    """One piece of memory."""

    def __init__(self, size: int) -> None:
        self.owner = os.getpid()
        self._memory = _map_memory(size + _HUGE_PAGE)
        # Memory that began as an inference tensor could only be written to in inference mode.
        with torch.inference_mode(False):
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            # Huge pages need memory that begins where one begins. The slice keeps the mapping alive.
            self.bytes = whole[-whole.data_ptr() % _HUGE_PAGE :][: -size % ALIGNMENT + size]
        self._pinning_tried = False

    def ensure_pinned(self, device: torch.device) -> None:
        """Pin the memory for copies from a device, at the first call; say so when that is not possible."""
        if self._pinning_tried:
            return
        if device.type == "cuda":
            # Not in this thread: CUDA keeps the error of a failed call for the thread's next kernel to raise.
            pinned = InterruptSafeEvent()

            def pin() -> None:
                try:
                    self._pin(device)
                finally:
                    pinned.set()

            # Not a daemon: a thread that is inside torch when the interpreter goes away aborts the process.
            threading.Thread(target=pin, name="checkpoint staging memory").start()
            pinned.wait()
        else:
            self._pinning_tried = True
            self._tell_unpinned(device, f"this is not done for {device.type} devices")

    def _pin(self, device: torch.device) -> None:
        self._pinning_tried = True
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = self.bytes.data_ptr()
        # A new thread begins with device 0, and would take memory there.
        with torch.cuda.device(device):
            code = int(runtime.cudaHostRegister(address, self.bytes.numel(), _REGISTER_PORTABLE))
        if code != 0:
            self._tell_unpinned(device, f"cudaHostRegister returned error {code}; see ulimit -l")
            return
        unregister, owner = runtime.cudaHostUnregister, self.owner
        # A forked child shares the object, but may not call CUDA.
        self._memory.unpin = lambda: unregister(address) if os.getpid() == owner else None

    def _tell_unpinned(self, device: torch.device, reason: str) -> None:
        _logger.warning(
            "%d bytes of staging memory are not pinned (%s); asynchronous saves from %s block longer",
            self.bytes.numel(),
            reason,
            device,
        )

    def place(self, tensor: torch.Tensor, offset: int, *, non_blocking: bool) -> torch.Tensor:
        """Copy one tensor to an offset and return the copy."""
        target = self.bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # Resolved on the source's device: the host would do it before a non-blocking copy has arrived.
        return target.copy_(tensor.detach().resolve_conj().resolve_neg(), non_blocking=non_blocking)


def _map_memory(size: int) -> _HostMemory:
    """Anonymous memory, in huge pages where the system has them: cheaper to provide and to walk through."""
    try:
        memory = _HostMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"the system refuses {size} bytes of memory for staging ({error.strerror}). An asynchronous "
            "save holds a second copy of what this rank saves. Free or add memory, or set async_save=False."
        ) from error
    # Without the second, each fork (a data loader's worker) makes the next copy as slow as the first one,
    # because the pages are shared with the child until they are written to.
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
        if advice is not None:
            try:
                memory.madvise(advice)
            except OSError as error:
                _logger.debug("madvise(%d) is not available for staging memory: %s", advice, error)
    return memory


def _padded_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % ALIGNMENT


def _check_dense(key: object, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise CheckpointError(
            f"tensor {key} cannot be staged: it is {kind}, and only dense tensors with data can be copied. "
            "Save its dense parts, or materialise it."
        )
