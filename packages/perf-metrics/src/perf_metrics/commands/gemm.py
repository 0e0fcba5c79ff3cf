"""`perf-metrics gemm`: what tiles cost a matrix multiplication, and OFU beside a measured one."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..display import format_value, text_table
from ..ofu.kernels import (
    EffectiveSizes,
    GemmKernel,
    candidate_kernels,
    effective_sizes,
    explain,
    parse_kernel,
)

if TYPE_CHECKING:
    from hardware_table import Accelerator

    from ..ofu.calibration import GemmCalibration
    from . import OneLineParser

_WIDTH = 72


def short_name(name: str) -> str:
    """The name in the width of a table. The middle of a long one says least."""
    if len(name) <= _WIDTH:
        return name
    half = (_WIDTH - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"
_NOTE = (
    "prediction: which kernel cuBLAS picks for these sizes is not known; these are shapes that public traces "
    "show. Read the kernel's name in a profile and pass it as --kernel."
)
_OTHER_TF32 = (
    "for TF32 cuBLAS chooses kernels that are not among these (up to 33 % overhead in the publication on OFU)"
)

_MOST_POINTS = 2.0
"""Adjusted OFU of 95 to 100 % of the sizes was within 2 points in the publication, by GPU and type."""


def fill_gemm(parser: OneLineParser) -> None:
    """Add what `gemm` takes."""
    parser.description = (
        "Sizes as torch's mm has them: [M, K] x [K, N]. M is tokens and N is out_features. "
        "cuBLAS sees the transpose: its m is N, its n is M. With --measure the products run on the device of "
        "this machine, and OFU from its counters is held against their FLOP/s. Let nobody else use it then."
    )
    parser.add_argument("m", type=int, metavar="M", help="rows: tokens")
    parser.add_argument("n", type=int, metavar="N", help="columns: out_features")
    parser.add_argument("k", type=int, metavar="K", help="depth: in_features")
    parser.add_argument("--dtype", default="bf16", help="number format: bf16 (default), fp16, tf32, fp8, fp4")
    parser.add_argument(
        "--device", metavar="NAME", help=f"as torch names it (default: {DEFAULT_DEVICE}); not with --measure"
    )
    parser.add_argument("--kernel", metavar="NAME", help="name of the kernel, from a profile")
    parser.add_argument(
        "--measure", action="store_true", help="run the products here, and hold OFU against their rate"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="SECONDS", help="how long to measure; default 3; with --measure"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in FLOPs, seconds and shares")
    parser.set_defaults(run=run_gemm)


def run_gemm(options: argparse.Namespace) -> int:
    """Print the table, or what was measured.

    Raises:
        ModuleNotFoundError: `--measure`, and torch is not installed.
        ValueError: A size is below 1, the number format is unknown or cannot be measured, the kernel's name
            is not understood, or options exclude each other.
    """
    if options.measure:
        return _measure(options)
    if options.seconds is not None:
        raise ValueError(f"--seconds={options.seconds:g} needs --measure. Add it, or leave --seconds out.")
    options.device = options.device or DEFAULT_DEVICE
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
    table = text_table(header, [_gemm_row(asked, *row, predicted) for row in rows], left=(0, 7))
    if not predicted:
        return f"{heading}\n\n{table}"
    extra = sorted(sizes.flops / asked.flops - 1 for _, sizes in rows)
    bound = f"lower bound: {_OTHER_TF32}; " if asked.dtype_name == "tf32" else ""
    return f"{heading}\n\n{table}\n\noverhead from {extra[0]:.2%} to {extra[-1]:.2%}; {bound}{_NOTE}"


def _inexact(asked: _Asked, sizes: EffectiveSizes, predicted: bool) -> str | None:
    """Why the overhead of a kernel is a lower bound of that of the product; None where it is exact."""
    return _OTHER_TF32 if predicted and asked.dtype_name == "tf32" else sizes.inexact


def _gemm_row(asked: _Asked, kernel: GemmKernel, sizes: EffectiveSizes, predicted: bool) -> tuple[str, ...]:
    tile, inexact = kernel.tile, _inexact(asked, sizes, predicted)
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
        "yes" if inexact is None else "lower bound" + ("" if inexact == _OTHER_TF32 else f": {inexact}"),
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
                "exact": _inexact(asked, sizes, predicted) is None,
                "inexact": _inexact(asked, sizes, predicted),
            }
            for kernel, sizes in rows
        ],
    }


def _measure(options: argparse.Namespace) -> int:
    from ..ofu.calibration import calibrate_gemm

    if options.device is not None:
        raise ValueError(
            f"--device={options.device} and --measure exclude each other: what is measured is the device of "
            "this process, as CUDA_VISIBLE_DEVICES has it. Leave one of them out."
        )
    seconds = 3.0 if options.seconds is None else options.seconds
    found = calibrate_gemm(
        options.m, options.n, options.k, options.dtype, seconds=seconds, kernel=options.kernel
    )
    print(json.dumps(_measured_json(found), indent=2) if options.json else _measured_report(found))
    return 0


def _measured_report(found: GemmCalibration) -> str:
    heading = (
        f"[{found.m:,}, {found.k:,}] x [{found.k:,}, {found.n:,}] in {found.dtype} on {found.device_name}: "
        f"{found.products:,} products in {found.seconds:.2f} s"
    )
    rows = [
        ("rate", _tera(found.flops_per_second)),
        ("peak", _tera(found.peak_flops)),
        ("rate / peak", format_value(found.share_of_peak, ".2%")),
    ]
    window = found.window
    if window is not None and window.samples:
        clocks = f"{window.sm_mhz:,.0f} MHz, {window.lowest_sm_mhz:,.0f} to {window.highest_sm_mhz:,.0f}"
        of_peak = f", at the peak {_cycle_flops_at_peak(found):,.0f}" if _cycle_flops_at_peak(found) else ""
        rows += [
            ("SM clock", f"{clocks}; tensor peak at {format_value(window.tensor_mhz, ',.0f')} MHz"),
            ("FLOPs per SM and cycle", format_value(found.flops_per_cycle, ",.0f") + of_peak),
            ("tensor activity", format_value(window.tensor_activity, ".2%")),
            ("OFU", format_value(found.ofu, ".2%")),
            ("tiles", _tiles(found)),
            ("adjusted OFU", format_value(found.adjusted_ofu, ".2%")),
            (_difference_name(found), f"{format_value(found.difference_points, '+.2f')} points"),
            ("cycle counters", _counters(found)),
        ]
    # The rows are name and value; a header would say no more.
    width = max(len(name) for name, _ in rows)
    text = "\n".join((heading, "", *(f"{name:<{width}}  {value}" for name, value in rows)))
    remarks = [one for one in (found.problem, _far_apart(found)) if one is not None]
    return "\n\n".join((text, *remarks))


def _far_apart(found: GemmCalibration) -> str | None:
    points = found.difference_points
    if found.problem is not None or points is None or abs(points) <= _MOST_POINTS:
        return None
    known = found.adjusted_ofu is not None
    tiles = "" if known else "the tiles of the kernel are unknown; else "
    return (
        f"more than {_MOST_POINTS:g} points apart: {tiles}does somebody else use the device, or is the "
        "tensor clock or the peak another one?"
    )


def _tera(flops: float | None) -> str:
    return "unknown" if flops is None else f"{flops / 1e12:,.4g} TFLOP/s"


def _cycle_flops_at_peak(found: GemmCalibration) -> float | None:
    """FLOPs of one SM in one cycle that the peak stands for."""
    mhz = None if found.window is None else found.window.tensor_mhz
    if found.peak_flops is None or mhz is None or found.units is None:
        return None
    return found.peak_flops / (found.units * mhz * 1e6)


def _tiles(found: GemmCalibration) -> str:
    tiles = found.tiles
    name = "" if tiles.kernel is None else f"{short_name(tiles.kernel)}: "
    if tiles.overhead is None:
        return f"{name}overhead unknown: {tiles.inexact}"
    bound = "" if tiles.inexact is None else f", lower bound: {tiles.inexact}"
    return f"{name}{tiles.overhead:.2%}{bound}"


def _difference_name(found: GemmCalibration) -> str:
    return f"{'OFU' if found.adjusted_ofu is None else 'adjusted OFU'} - rate / peak"


def _counters(found: GemmCalibration) -> str:
    scale = found.cycle_scale
    if scale is None:
        return "this driver or its bindings have none"
    parts = []
    if scale.measured is not None:
        rounded = "" if scale.counts_per_cycle is None else f", taken as {scale.counts_per_cycle}"
        parts.append(f"{scale.measured:.4g} counts in a cycle{rounded}")
    if scale.tensor_activity is not None:
        parts.append(f"tensor / elapsed {scale.tensor_activity:.2%}")
    if found.ofu_of_cycles is not None:
        parts.append(f"OFU {found.ofu_of_cycles:.2%}")
    if scale.reason is not None:
        parts.append(scale.reason)
    return "; ".join(parts)


def _measured_json(found: GemmCalibration) -> dict[str, object]:
    scale = found.cycle_scale
    names = ("m", "n", "k", "dtype", "device_name", "products", "seconds", "peak_flops", "units", "problem")
    derived = ("flops_per_second", "share_of_peak", "flops_per_cycle", "ofu", "adjusted_ofu")
    return {
        **{name: getattr(found, name) for name in (*names, *derived, "difference_points", "ofu_of_cycles")},
        "tiles": asdict(found.tiles),
        "window": None if found.window is None else asdict(found.window),
        "cycle_scale": None if scale is None else asdict(scale),
    }
