"""`perf-metrics watch`, `gemm` and `trace`: OFU of this node, and what tiles cost."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..display import format_value, text_table
from ..ofu.kernels import (
    EffectiveSizes,
    GemmKernel,
    candidate_kernels,
    effective_sizes,
    explain,
    parse_kernel,
)
from ..ofu.sampler import SHORTEST_INTERVAL_S, DeviceWindow, OFUSampler
from ..ofu.samples import check_tensor_mhz
from ..uncertainty import plus_minus

if TYPE_CHECKING:
    from hardware_table import Accelerator

    from . import OneLineParser

_WIDTH = 72


def short_name(name: str) -> str:
    """The name in the width of a table. The middle of a long one says least."""
    if len(name) <= _WIDTH:
        return name
    half = (_WIDTH - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


_LONGEST_BETWEEN_SAMPLES_S = 1.0
_CLOCKS = ("sm_mhz", "lowest_sm_mhz", "highest_sm_mhz", "tensor_mhz")
_IN_LINES = ("uuid", "name", "ofu", "tensor_activity", *_CLOCKS, "samples")
_HEADER = ("GPU", "name", "OFU", "tensor active", "SM MHz", "lowest", "highest", "tensor MHz", "")
_CLEAR, _HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[2J", "\x1b[H", "\x1b[K", "\x1b[J"


def fill_watch(parser: OneLineParser) -> None:
    """Add what `watch` takes."""
    parser.description = (
        "Show every GPU of this node, of those in MIG mode every slice, until Ctrl-C. OFU = "
        "tensor activity x SM clock / clock of the tensor peak, for each sample, then averaged. Samples are "
        "taken once a second, or once an interval where that is shorter; OFU of 16 or more samples has half "
        "of its 95 % confidence interval. Needs Hopper or newer."
    )
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="time between rows; default 1"
    )
    parser.add_argument(
        "--json-lines", type=Path, metavar="FILE", help="append one JSON object a device and interval"
    )
    parser.add_argument("--once", action="store_true", help="show one interval and end")
    parser.add_argument(
        "--tensor-mhz",
        type=_tensor_mhz,
        metavar="MHZ",
        help="clock of the tensor peak; default: by the device's name, from hardware-table",
    )
    parser.set_defaults(run=run_watch)


def run_watch(options: argparse.Namespace) -> int:
    """Show tables until Ctrl-C, or one with `--once`.

    Returns:
        Exit status: 0; 1 where NVML cannot be opened or has no devices.

    Raises:
        ModuleNotFoundError: nvidia-ml-py is not installed.
        OSError: `--json-lines` cannot be written.
    """
    sampler = OFUSampler(
        interval_s=min(options.interval, _LONGEST_BETWEEN_SAMPLES_S), tensor_mhz=options.tensor_mhz
    )
    try:
        if options.json_lines is None:
            return _watch(sampler, options, None)
        with options.json_lines.open("a", encoding="utf-8") as lines:
            return _watch(sampler, options, lines)
    except KeyboardInterrupt:
        print()
        return 0
    finally:
        sampler.stop()


def _watch(sampler: OFUSampler, options: argparse.Namespace, lines: TextIO | None) -> int:
    sampler.start()
    live = sys.stdout.isatty() and not options.once
    due, shown = time.monotonic() + options.interval, 0
    while True:
        if (problem := sampler.problem) is not None:
            print(f"perf-metrics watch: unavailable: {problem}", file=sys.stderr)
            return 1
        time.sleep(max(0.0, due - time.monotonic()))
        # The threads need not be in step with this one: give them the time of another sample.
        sampler.wait(options.interval)
        devices = sampler.window().devices
        _show(devices, time.time(), live=live, first=shown == 0)
        if lines is not None:
            _append(lines, devices, time.time())
        if options.once:
            return 0
        due, shown = max(due + options.interval, time.monotonic()), shown + 1


def _show(devices: Sequence[DeviceWindow], now: float, *, live: bool, first: bool) -> None:
    title = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    table = text_table(_HEADER, [_device_row(device) for device in devices], left=(0, 1, len(_HEADER) - 1))
    text = f"{title}\n{table}\n"
    if live:
        text = (_CLEAR if first else "") + _HOME + text.replace("\n", f"{_REST_OF_LINE}\n") + _REST_OF_SCREEN
    elif not first:
        text = f"\n{text}"
    sys.stdout.write(text)
    sys.stdout.flush()


def _device_row(device: DeviceWindow) -> tuple[str, ...]:
    return (
        device.label,
        device.name,
        _ofu(device),
        format_value(device.tensor_activity, ".1%"),
        *(format_value(getattr(device, clock), ".0f") for clock in _CLOCKS),
        device.reason or device.problem or "",
    )


def _ofu(device: DeviceWindow) -> str:
    half_width = None if device.interval is None else device.interval.half_width
    ofu = format_value(device.ofu, ".1%")
    return ofu if half_width is None else f"{ofu} ({plus_minus(100 * half_width)})"


def _append(lines: TextIO, devices: Sequence[DeviceWindow], now: float) -> None:
    for device in devices:
        cycles, scale = device.cycles, device.cycle_scale()
        entry = {
            "timestamp": now,
            "gpu": device.label,
            **{name: getattr(device, name) for name in _IN_LINES},
            "seconds": round(device.seconds, 3),
            "sm_cycles_elapsed": None if cycles is None else cycles.elapsed,
            "sm_cycles_active": None if cycles is None else cycles.active,
            "tensor_cycles_active": None if cycles is None else cycles.tensor,
            "cycles_seconds": round(device.cycles_seconds, 3),
            "counts_per_cycle": None if scale is None else scale.counts_per_cycle,
            "ofu_of_cycles": device.ofu_of_cycles(),
            "reason": device.reason or device.problem,
            "ofu_half_width": None if device.interval is None else device.interval.half_width,
        }
        lines.write(json.dumps(entry) + "\n")
    lines.flush()


def _interval(text: str) -> float:
    value = _number(text)
    if not SHORTEST_INTERVAL_S <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be {SHORTEST_INTERVAL_S} seconds or more")
    return value


def _tensor_mhz(text: str) -> float:
    value = _number(text)
    try:
        check_tensor_mhz(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None


DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"
_NOTE = (
    "prediction: which kernel cuBLAS picks for these sizes is not known; these are shapes that public traces "
    "show. Read the kernel's name in a profile and pass it as --kernel."
)


def fill_gemm(parser: OneLineParser) -> None:
    """Add what `gemm` takes."""
    parser.description = (
        "Sizes as torch's mm has them: [M, K] x [K, N]. M is tokens and N is out_features. "
        "cuBLAS sees the transpose: its m is N, its n is M."
    )
    parser.add_argument("m", type=int, metavar="M", help="rows: tokens")
    parser.add_argument("n", type=int, metavar="N", help="columns: out_features")
    parser.add_argument("k", type=int, metavar="K", help="depth: in_features")
    parser.add_argument("--dtype", default="bf16", help="number format: bf16 (default), fp16, tf32, fp8, fp4")
    parser.add_argument(
        "--device",
        default=DEFAULT_DEVICE,
        metavar="NAME",
        help=f"as torch names it (default: {DEFAULT_DEVICE})",
    )
    parser.add_argument("--kernel", metavar="NAME", help="name of the kernel, from a profile")
    parser.add_argument("--json", action="store_true", help="print JSON, in FLOPs, seconds and shares")
    parser.set_defaults(run=run_gemm)


def run_gemm(options: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        ValueError: A size is below 1, the number format is unknown, or the kernel's name is not understood.
    """
    # Imported here: the other commands must not need the table.
    from hardware_table import lookup, peak_flops

    for name in ("m", "n", "k"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name.upper()}={getattr(options, name)} must be 1 or more.")
    device = lookup(options.device)
    # For its check of the number format, which must not depend on whether the device is known.
    peak_flops(options.device, options.dtype)
    asked = _Asked(options.m, options.n, options.k, options.dtype, options.device, device)
    given = None if options.kernel is None else _kernel(options.kernel)
    kernels = candidate_kernels(_capability(device), asked.dtype_name) if given is None else (given,)
    rows = [(kernel, asked.in_tiles(kernel)) for kernel in kernels]
    # By what is known: the least extra work is not why cuBLAS chooses a small tile.
    rows.sort(key=lambda row: -row[0].tile.m * row[0].tile.n)
    if options.json:
        print(json.dumps(_gemm_json(asked, rows, predicted=given is None), indent=2))
    else:
        print(_gemm_report(asked, rows, predicted=given is None))
    return 0


@dataclass(frozen=True)
class _Asked:
    """The multiplication, in torch's terms, and the device."""

    m: int
    n: int
    k: int
    dtype: str
    device_name: str
    device: Accelerator | None

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def dtype_name(self) -> str:
        """As hardware-table names it: "bf16" for "torch.bfloat16"."""
        peak = None if self.device is None else self.device.peak(self.dtype)
        return self.dtype if peak is None else peak.dtype

    @property
    def peak_flops(self) -> float | None:
        return None if self.device is None else self.device.peak_flops(self.dtype)

    def seconds(self, flops: int) -> float | None:
        """Time at the peak, or None if that is unknown."""
        return None if self.peak_flops is None else flops / self.peak_flops

    def in_tiles(self, kernel: GemmKernel) -> EffectiveSizes:
        m, n = (self.m, self.n) if kernel.row_major else (self.n, self.m)
        return effective_sizes(kernel, m, n, self.k)


def _kernel(name: str) -> GemmKernel:
    kernel = parse_kernel(name)
    if kernel is None:
        raise ValueError(f"--kernel={name} has no known tile: {explain(name)}.")
    return kernel


def _capability(device: Accelerator | None) -> str | None:
    # Compute capabilities of NVIDIA and AMD are numbered alike.
    return device.compute_capability if device is not None and device.vendor == "NVIDIA" else None


def _gemm_report(asked: _Asked, rows: list[tuple[GemmKernel, EffectiveSizes]], *, predicted: bool) -> str:
    seconds = asked.seconds(asked.flops)
    at_peak = f"{_micro(seconds)} us at {(asked.peak_flops or 0) / 1e12:,.1f} TFLOP/s of {asked.device_name}"
    if seconds is None:
        at_peak = (
            f"time at the peak unknown: hardware-table has no {asked.dtype} peak for {asked.device_name!r}"
        )
    heading = (
        f"[{asked.m:,}, {asked.k:,}] x [{asked.k:,}, {asked.n:,}] in {asked.dtype}: "
        f"{asked.flops / 1e9:,.3f} GFLOP; {at_peak}"
    )
    if not rows:
        none = (
            f"no kernel for {asked.dtype} on {asked.device_name!r} was collected: pass its name as --kernel"
        )
        return f"{heading}\nno prediction: {none}"
    header = (
        "kernel",
        "tile",
        "cluster",
        "m' x n' x k' (cuBLAS)",
        "blocks",
        "overhead",
        "us at peak",
        "exact",
    )
    table = text_table(header, [_gemm_row(asked, *row) for row in rows], left=(0, 7))
    if not predicted:
        return f"{heading}\n\n{table}"
    extra = sorted(sizes.flops / asked.flops - 1 for _, sizes in rows)
    return f"{heading}\n\n{table}\n\noverhead from {extra[0]:.2%} to {extra[-1]:.2%}; {_NOTE}"


def _gemm_row(asked: _Asked, kernel: GemmKernel, sizes: EffectiveSizes) -> tuple[str, ...]:
    tile = kernel.tile
    seconds = asked.seconds(sizes.flops)
    known = tile.cluster_m is not None and tile.cluster_n is not None
    return (
        short_name(kernel.name),
        f"{tile.m}x{tile.n}x{tile.k or '?'}",
        f"{tile.cluster_m}x{tile.cluster_n}" if known else "?",
        f"{sizes.m}x{sizes.n}x{sizes.k}",
        f"{sizes.blocks:,}",
        f"{sizes.flops / asked.flops - 1:.2%}",
        "unknown" if seconds is None else _micro(seconds),
        f"no: {sizes.inexact}" if sizes.inexact else "yes",
    )


def _micro(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e6:,.3f}"


def _gemm_json(
    asked: _Asked, rows: list[tuple[GemmKernel, EffectiveSizes]], *, predicted: bool
) -> dict[str, object]:
    return {
        "device": asked.device_name,
        **{name: getattr(asked, name) for name in ("m", "n", "k", "dtype", "flops", "peak_flops")},
        "seconds_at_peak": asked.seconds(asked.flops),
        "predicted": predicted,
        "note": _NOTE if predicted else None,
        "kernels": [
            {
                "name": kernel.name,
                "effective": {"m": sizes.m, "n": sizes.n, "k": sizes.k},
                "blocks": sizes.blocks,
                "flops": sizes.flops,
                "overhead": sizes.flops / asked.flops - 1,
                "seconds_at_peak": asked.seconds(sizes.flops),
                "exact": sizes.exact,
                "inexact": sizes.inexact,
            }
            for kernel, sizes in rows
        ],
    }
