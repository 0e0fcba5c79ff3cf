"""Holds OFU against matrix products of known FLOPs on the device of this process."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from ..traces.trace_file import TraceFileError
from ..utilization import wait_for_device
from .cycles import CycleScale
from .kernels import adjusted_ofu, effective_sizes, explain, parse_kernel
from .nvml import UnavailableError, current_cuda_device
from .sampler import DeviceWindow, OFUSampler
from .trace import KernelOverhead, LeftOut, trace_overhead

# Nothing here was run on a GPU. What was: the counters through a compiled stand-in for NVML, on a device in
# host memory (`tests/device`), and the rate on a CPU.

TYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
"""What `torch.mm` multiplies, and the types of its matrices. FP8 and FP4 need scales and other operators."""
_BATCH_S = 0.1
"""Between two waits for the device: its queue stays full, and the end is not far."""
_WARM_UP_S = 1.0
_SAMPLES_S = 0.2


@dataclass(frozen=True)
class TileWork:
    """What the kernel of a product computes beyond what was asked for.

    Attributes:
        kernel: Name of the kernel; None when unknown.
        overhead: Work of its tiles on top, as a share; None when unknown.
        inexact: Why `overhead` is a lower bound, or why it is None; None if it is exact.
    """

    kernel: str | None
    overhead: float | None
    inexact: str | None


@dataclass(frozen=True, kw_only=True)
class GemmCalibration:
    """Products of [m, k] x [k, n], one after the other, and what the counters told of them.

    Attributes:
        m: Rows: tokens.
        n: Columns: out_features.
        k: Depth: in_features.
        dtype: "bf16", "fp16", "tf32" or "fp32".
        device_name: Name of the device; "cpu" for the CPU.
        products: How many were measured.
        seconds: Time that they took.
        peak_flops: Dense peak of the type in FLOP/s; None when unknown.
        units: SMs of the device; None when unknown.
        window: What NVML told of the device meanwhile; None where it was not asked.
        tiles: What the kernel's tiles add.
        problem: Why OFU is missing, in words; None where it is not.
    """

    m: int
    n: int
    k: int
    dtype: str
    device_name: str
    products: int
    seconds: float
    peak_flops: float | None
    units: int | None
    window: DeviceWindow | None
    tiles: TileWork
    problem: str | None

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the products: 2 m n k each, without what tiles add."""
        return 2 * self.m * self.n * self.k * self.products / self.seconds

    @property
    def share_of_peak(self) -> float | None:
        """`flops_per_second` / `peak_flops`."""
        return None if self.peak_flops is None else self.flops_per_second / self.peak_flops

    @property
    def flops_per_cycle(self) -> float | None:
        """FLOPs of one SM in one cycle of the mean SM clock that was seen."""
        mhz = None if self.window is None else self.window.sm_mhz
        if not mhz or self.units is None:
            return None
        return self.flops_per_second / (self.units * mhz * 1e6)

    @property
    def ofu(self) -> float | None:
        """OFU as a share, by activity and clock of each sample; None with a `problem`."""
        return None if self.window is None or self.problem is not None else self.window.ofu

    @property
    def adjusted_ofu(self) -> float | None:
        """OFU without the work that tiles add; None where that is unknown."""
        if self.ofu is None or self.tiles.overhead is None:
            return None
        return adjusted_ofu(self.ofu, self.tiles.overhead)

    @property
    def difference_points(self) -> float | None:
        """Adjusted OFU (OFU where the tiles are unknown) less the share of the peak, in percentage points."""
        ofu = self.ofu if self.adjusted_ofu is None else self.adjusted_ofu
        if ofu is None or self.share_of_peak is None:
            return None
        return 100 * (ofu - self.share_of_peak)

    @property
    def ofu_of_cycles(self) -> float | None:
        """OFU as a share, by the driver's running counts alone; None where `ofu` or their scale is."""
        return None if self.window is None or self.ofu is None else self.window.ofu_of_cycles(self.units)

    @property
    def cycle_scale(self) -> CycleScale | None:
        """How the driver's running counts are counted; None where it has none."""
        return None if self.window is None else self.window.cycle_scale(self.units)


def calibrate_gemm(
    m: int, n: int, k: int, dtype: str = "bf16", *, seconds: float = 3.0, kernel: str | None = None
) -> GemmCalibration:
    """Measure products of [m, k] x [k, n] on the device of this process, and read its counters meanwhile.

    The matrices hold random numbers, as power and so the clock depend on what they hold. A second of the same
    products goes before. On a CPU, and where NVML has no counters, only the rate is measured, and `problem`
    says why. The kernel is that of one product in a profile, unless it is given. Others must not use the
    device: the counters are the device's.

    Args:
        m: Rows: tokens.
        n: Columns: out_features.
        k: Depth: in_features.
        dtype: "bf16", "fp16", "tf32" or, without tensor cores, "fp32".
        seconds: How long to measure, at least.
        kernel: Name of the kernel, from a profile of these products.

    Raises:
        ModuleNotFoundError: torch is not installed.
        ValueError: A size is below 1, `seconds` is not above 0, `torch.mm` or this device does not multiply
            the type, or the kernel's name is not understood.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 1:
            raise ValueError(f"{name}={size!r} must be 1 or more.")
    if dtype not in TYPES:
        raise ValueError(f"dtype={dtype!r} cannot be measured by torch.mm. Use one of {', '.join(TYPES)}.")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} must be a number above 0.")
    given = None if kernel is None else _given_tiles(kernel, m, n, k)
    torch = _torch()
    from hardware_table import detect, resolve_peak

    found = detect()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and dtype == "tf32":
        raise ValueError("dtype='tf32' needs a GPU, and this process has none. Use bf16, fp16 or fp32.")
    with torch.inference_mode(), _precision(dtype):
        product = _product(m, n, k, TYPES[dtype], "cpu" if accelerator is None else str(accelerator))
        product()
        on_cpu = TileWork(None, None, "on a CPU products have no tiles that are known")
        tiles = given or (on_cpu if accelerator is None else _profiled_tiles(product))
        measured = _on_cpu(product, seconds) if accelerator is None else _sampled(product, seconds, dtype)
    count, elapsed, window, problem = measured
    return GemmCalibration(
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        device_name=str(accelerator or "cpu") if found is None else found.name,
        products=count,
        seconds=elapsed,
        peak_flops=None if found is None else resolve_peak(found, dtype).flops,
        units=None if found is None else found.units,
        window=window,
        tiles=tiles,
        problem=problem,
    )


def _torch() -> ModuleType:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "measuring matrix products needs torch, which is not installed. Install it with "
            "`pip install 'perf-metrics[torch]'`.",
            name=error.name,
        ) from error
    return torch


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Have torch compute float32 as asked for, and as before afterwards."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product(m: int, n: int, k: int, name: str, device: str) -> Callable[[], object]:
    import torch

    # A generator of its own: no random number of the process is drawn for this.
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, name)
    left = torch.randn(m, k, device=device, generator=generator).to(dtype)
    # As the weight of a linear layer: [out_features, in_features].
    right = torch.randn(n, k, device=device, generator=generator).to(dtype).T
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: torch.mm(left, right, out=out)


def _repeat(product: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Run products for at least that long; return their number and the time."""
    wait_for_device()
    begun = time.perf_counter()
    count, batch, elapsed = 0, 1, 0.0
    while elapsed < seconds:
        for _ in range(batch):
            product()
        wait_for_device()
        count, elapsed = count + batch, time.perf_counter() - begun
        batch = max(1, round(count / elapsed * min(_BATCH_S, seconds)))
    return count, elapsed


_Measured: TypeAlias = tuple[int, float, DeviceWindow | None, str | None]
"""Products, seconds, what the counters told, and why OFU is missing."""


def _on_cpu(product: Callable[[], object], seconds: float) -> _Measured:
    return *_repeat(product, seconds), None, "measured on the CPU, not on a GPU: the rate only"


def _sampled(product: Callable[[], object], seconds: float, dtype: str) -> _Measured:
    try:
        sampler = OFUSampler([current_cuda_device()], interval_s=_SAMPLES_S)
        sampler.start()
    except (UnavailableError, ModuleNotFoundError) as error:
        _repeat(product, _WARM_UP_S)
        return *_repeat(product, seconds), None, f"the rate only: {error}"
    with sampler:
        _repeat(product, _WARM_UP_S)
        sampler.window()
        count, elapsed = _repeat(product, seconds)
        window = sampler.window()
    if not window.devices:
        return count, elapsed, None, f"the rate only: {window.problem}"
    (device,) = window.devices
    problem = None if device.reason is None else f"the rate only: {device.reason}"
    if dtype == "fp32":
        problem = "fp32 products do not run on tensor cores, so OFU says nothing of them"
    elif device.samples == 0 and device.problem is None:
        problem = f"the rate only: no sample in {elapsed:.2g} s; measure for longer"
    return count, elapsed, device, problem


def _given_tiles(name: str, m: int, n: int, k: int) -> TileWork:
    kernel = parse_kernel(name)
    if kernel is None:
        raise ValueError(f"kernel={name!r} has no known tile: {explain(name)}.")
    rows, columns = (m, n) if kernel.row_major else (n, m)
    sizes = effective_sizes(kernel, rows, columns, k)
    return TileWork(name, sizes.flops / (2 * m * n * k) - 1, sizes.inexact)


def _profiled_tiles(product: Callable[[], object]) -> TileWork:
    """Find the kernel of the product in a profile of one."""
    from torch.profiler import profile

    with profile(record_shapes=True) as recorded:
        product()
        wait_for_device()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        return tiles_of_trace(path)


def tiles_of_trace(path: Path) -> TileWork:
    """Return what the longest kernel in a profile of one product adds."""
    try:
        trace = trace_overhead(path)
    except TraceFileError:
        return TileWork(None, None, "the profile of a product has no kernels of a GPU")
    left_out = (*trace.unreadable, *trace.without_sizes, *trace.plain_cores)
    matrix_work: tuple[KernelOverhead | LeftOut, ...] = (*trace.kernels, *left_out)
    if not matrix_work:
        return TileWork(None, None, "the profile of a product has no kernel that multiplies matrices")
    longest = max(matrix_work, key=lambda one: one.seconds)
    if isinstance(longest, LeftOut):
        return TileWork(longest.name, None, longest.reason)
    return TileWork(longest.kernel.name, longest.overhead, longest.inexact)
