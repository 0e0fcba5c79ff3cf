"""The Python part of the fake device: what `torch.cuda` asks of a build with CUDA, and what tests ask.

Named here are attributes of `torch._C`, `torch.cuda` and `torch.distributed` of torch 2.13 that a build
without CUDA lacks or answers with an error. The device's name and capability are invented.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from device_lines import Collector
from fakecuda_library import Report, lib

DEVICES = int(os.environ.get("FAKECUDA_DEVICES", "2"))
NAME = os.environ.get("FAKECUDA_NAME", "NVIDIA H100 80GB HBM3")
INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")


# ---- What tests ask


@dataclass(frozen=True)
class Observation:
    """One wait of the host, or one race."""

    what: str
    where: str
    """File and line of the innermost frames outside torch, newest first; of a thread of torch its name."""


waits: list[Observation] = []
races: list[Observation] = []


def _where() -> str:
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if not name.startswith(INSIDE):
            found.append(f"{name.rpartition('/src/')[2]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or threading.current_thread().name


_sync_debug_mode = 0


def _on_wait(what: bytes) -> None:
    waits.append(Observation(what.decode(), _where()))
    # As on a GPU, where waits that a program asks for are not warned of.
    if _sync_debug_mode and not what.endswith(b"synchronize"):
        warnings.warn(f"called a synchronizing CUDA operation: {what.decode()}", stacklevel=2)


def _set_sync_debug_mode(mode: int) -> None:
    global _sync_debug_mode
    _sync_debug_mode = mode


def _on_race(what: bytes) -> None:
    races.append(Observation(what.decode(), _where()))


collector = Collector(Path(_LINES)) if (_LINES := os.environ.get("FAKECUDA_LINES")) else None
"""Notes executed lines, if the environment asks for it; see `device_lines.py`."""

# The library keeps pointers to these two.
_CALLBACKS = (Report(_on_wait), Report(_on_race))


@contextlib.contextmanager
def recorded_waits() -> Iterator[list[Observation]]:
    """Collect the waits of the host within the block."""
    found: list[Observation] = []
    before = len(waits)
    try:
        yield found
    finally:
        found += waits[before:]


@contextlib.contextmanager
def recorded_races() -> Iterator[list[Observation]]:
    """Collect the races within the block, and forget them: a test that expects them is not a failure."""
    found: list[Observation] = []
    before = len(races)
    try:
        yield found
    finally:
        found += races[before:]
        del races[before:]


@contextlib.contextmanager
def memory_limit(num_bytes: int, device: int = 0) -> Iterator[None]:
    """Let a device have this much memory within the block, with what it holds already."""
    before = lib.fakecuda_limit(device)
    lib.fakecuda_set_limit(device, num_bytes)
    try:
        yield
    finally:
        lib.fakecuda_set_limit(device, before)


# ---- Devices, streams and events


def _index(device: Any = None) -> int:
    if device is None:
        return int(lib.fakecuda_current())
    if isinstance(device, int):
        return int(lib.fakecuda_current()) if device < 0 else device
    index = torch.device(device).index
    return int(lib.fakecuda_current()) if index is None else index


@dataclass(frozen=True)
class Properties:
    """What `torch.cuda.get_device_properties` returns."""

    total_memory: int
    uuid: str
    pci_bus_id: int
    name: str = NAME
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    L2_cache_size: int = 50 << 20
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""


def _properties(device: Any = None) -> Properties:
    index = _index(device)
    if not 0 <= index < DEVICES:
        raise AssertionError("Invalid device id")
    return Properties(lib.fakecuda_limit(index), f"00000000-0000-0000-0000-{index:012d}", index)


class Stream(torch.Stream):
    """`torch.cuda.Stream` over the streams that torch has for every accelerator."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        if "stream_id" in given:
            return super().__new__(cls, **given)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)


class Event(torch.Event):
    """`torch.cuda.Event` over the events that torch has for every accelerator."""

    enable_timing: bool

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        made = super().__new__(cls, torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)
        made.enable_timing = enable_timing
        return made

    def record(self, stream: Any = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Any) -> float:
        # torch's own refuses what is not exactly a torch.Event.
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.event_id and end_event.event_id):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(lib.fakecuda_elapsed(self.event_id, end_event.event_id))


def _cuda_stream(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    device, before = lib.fakecuda_current(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        lib.fakecuda_set_current(device)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    stream = torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
    torch.accelerator.set_stream(stream)


def _exchange_device(device: int) -> int:
    before = int(lib.fakecuda_current())
    if device >= 0:
        lib.fakecuda_set_current(device)
    return before


class Runtime:
    """`torch.cuda.cudart()`: the calls that pin memory, and those that name a range for a profiler."""

    class cudaError:
        success = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        return int(lib.fakecuda_host_register(address, num_bytes))

    def cudaHostUnregister(self, address: int) -> int:
        return int(lib.fakecuda_host_unregister(address))

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return _memory_info(device)

    def cudaProfilerStart(self) -> int:
        return 0

    def cudaProfilerStop(self) -> int:
        return 0


# ---- Memory


def _memory_info(device: Any = None) -> tuple[int, int]:
    free, total = torch.accelerator.get_memory_info(_index(device))
    return int(free), int(total)


def _memory_stats(device: Any = None) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in torch.accelerator.memory_stats(_index(device)).items():
        *path, last = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _snapshot(*_: Any) -> dict[str, Any]:
    """The blocks as `torch.cuda.memory._snapshot` gives them: here each block is a segment."""
    segments = []
    for device in range(DEVICES):
        count = lib.fakecuda_blocks(device, None, 0)
        rows = (ctypes.c_int64 * (5 * count))()
        count = min(count, lib.fakecuda_blocks(device, rows, count))
        for start in range(0, 5 * count, 5):
            address, size, requested, stream, allocated = rows[start : start + 5]
            state = "active_allocated" if allocated else "inactive"
            block = {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": state,
                "frames": [],
            }
            segment = {"device": device, "address": address, "total_size": size, "stream": stream}
            sizes = {"allocated_size": size * allocated, "active_size": size * allocated}
            segments.append(
                {**segment, **sizes, "requested_size": requested, "segment_type": "small", "blocks": [block]}
            )
    return {"segments": segments, "device_traces": [[] for _ in range(DEVICES)], "allocator_settings": {}}


def _empty_on(device: torch.device) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _patch_storages() -> None:
    """Copies and sizes of storages, which go to CUDA's runtime without an operator."""
    to_before, resize_before = torch.UntypedStorage.to, torch.UntypedStorage.resize_

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        device = torch.device(device)
        if {device.type, self.device.type} != {"cuda", "cpu"}:
            return to_before(self, device=device, non_blocking=non_blocking)
        here: torch.Tensor = _empty_on(self.device).set_(self)
        return here.to(device, non_blocking=non_blocking and device.type == "cuda").untyped_storage()

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        if self.device.type != "cuda":
            return resize_before(self, size)
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
            # Of size 0, for set_ refuses a storage that is smaller than what its size asks for.
            whole = _empty_on(self.device).set_(self, 0, (0,), (1,))
            torch.ops.fakecuda.resize_storage(whole, size)
        return self

    def cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return to(self, device="cpu") if self.device.type == "cuda" else self

    torch.UntypedStorage.to = to  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.cpu = cpu  # type: ignore[method-assign, assignment]


# ---- Process groups


class ProcessGroupNCCL(c10d.ProcessGroupGloo):
    """Gloo in the place of NCCL. Its group has it for the device type "cuda" only, so host tensors fail."""

    class Options:
        """What torch sets before it makes a group."""

        _timeout: datetime.timedelta = c10d.default_pg_timeout
        is_high_priority_stream = False

    uid = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        # torch looks at the class of a group's backend later; without a reference it sees the base class.
        _backends.append(self)

    def _add_ephemeral_timeout(self, timeout: datetime.timedelta) -> None:
        """NCCL lets the next collectives take longer."""


_backends: list[ProcessGroupNCCL] = []


def _patch_groups() -> None:
    ProcessGroupNCCL.__module__ = "torch.distributed.distributed_c10d"
    c10d._NCCL_AVAILABLE = True
    for module in (c10d, torch.distributed):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
    c10d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)
    torch.cuda.nccl.version = lambda: (2, 27, 3)  # type: ignore[assignment]
    torch.cuda.nccl.is_available = lambda tensors: False  # type: ignore[assignment]
    register = c10d.ProcessGroup._register_backend

    def register_backend(self: Any, device: torch.device, kind: Any, backend: Any = None) -> None:
        register(self, device, kind, backend)
        if device.type == "cuda":
            # Where the library's collectives find it, see its `fallback`.
            register(self, torch.device("privateuseone"), kind, backend)

    c10d.ProcessGroup._register_backend = register_backend  # type: ignore[method-assign]
    # A group bound to a device makes others by ncclCommSplit, which Gloo's options do not survive; without
    # the device they are made one by one.
    unbound: Any = property(lambda self: None, lambda self, device: None)
    c10d.ProcessGroup.bound_device_id = unbound
    # DistributedDataParallel times CUDA with a class of libtorch_cuda; without it the third forward asserts.
    logger: Any = torch._C._distributed_c10d.Logger
    logger.set_runtime_stats_and_log = lambda self: None


# ---- All of it


def _install() -> None:
    """Fill what `torch.cuda` lacks in a build without CUDA."""
    c: Any = torch._C
    cuda: Any = torch.cuda
    lib.fakecuda_report(*_CALLBACKS)
    c._cuda_getDeviceCount = lambda: DEVICES
    c._cuda_init = lambda: None
    c._cuda_isInBadFork = lambda: False
    c._cuda_getDevice = lambda: int(lib.fakecuda_current())
    c._cuda_setDevice = torch.accelerator.set_device_index
    c._cuda_exchangeDevice = c._cuda_maybeExchangeDevice = _exchange_device
    c._cuda_memoryStats = _memory_stats
    c._cuda_resetPeakMemoryStats = torch.accelerator.reset_peak_memory_stats
    c._cuda_resetAccumulatedMemoryStats = torch.accelerator.reset_accumulated_memory_stats
    c._cuda_set_sync_debug_mode = _set_sync_debug_mode
    c._cuda_get_sync_debug_mode = lambda: _sync_debug_mode
    c._cuda_emptyCache = torch.accelerator.empty_cache
    c._cuda_getCompiledVersion = lambda: 12080
    c._cuda_getArchFlags = lambda: "sm_90"
    c._cuda_synchronize = lambda: torch.accelerator.synchronize(lib.fakecuda_current())
    c._cuda_record_memory_history = lambda *args, **options: None
    c._cuda_memorySnapshot = _snapshot
    c._cuda_cudaHostAllocator = lambda: None
    c._cuda_getCurrentRawStream = lambda device: cuda.current_stream(device).stream_id
    c._cuda_setStream = _set_stream
    # Kernels run at once, so that none are ever captured.
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    c._cuda_getAllocatorBackend = lambda: "native"
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange_device
    cuda._is_compiled = lambda: True
    cuda._lazy_init = lambda: setattr(cuda, "_initialized", True)
    cuda.is_available = lambda: DEVICES > 0
    cuda.is_initialized = lambda: bool(cuda._initialized)
    cuda.device_count = lambda: DEVICES
    cuda.current_device = lambda: int(lib.fakecuda_current())
    cuda.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    cuda.get_device_properties = _properties
    cuda.get_device_name = lambda device=None: _properties(device).name
    cuda.get_device_capability = lambda device=None: (9, 0)
    c._cuda_canDeviceAccessPeer = lambda device, peer: device != peer
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.mem_get_info = cuda.memory.mem_get_info = _memory_info
    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    cuda.current_stream = lambda device=None: _cuda_stream(torch.accelerator.current_stream(_index(device)))
    cuda.default_stream = lambda device=None: Stream(stream_id=0, device_index=_index(device), device_type=1)
    cuda.set_stream = torch.accelerator.set_stream
    cuda.stream = _stream_context
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    cuda.cudart = Runtime
    cuda._initialized = True
    generators = []
    for device in range(DEVICES):
        lib.fakecuda_next_generator(device)
        generators.append(torch.Generator(device=f"cuda:{device}"))
    cuda.default_generators = tuple(generators)
    torch.version.cuda = "12.8"
    _patch_storages()
    _patch_groups()
    if collector is not None:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            # Not in ranks: DistributedDataParallel then copies from the host for each gradient.
            torch.autograd.set_multithreading_enabled(False)
        collector.start()


_install()
