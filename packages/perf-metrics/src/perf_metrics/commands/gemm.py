"""`perf-metrics gemm`: what a matrix multiplication costs in whole tiles, and at the peak of a device."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..display.text_table import text_table
from ..ofu.candidates import candidate_kernels
from ..ofu.kernel_names import GemmKernel, explain, parse_kernel
from ..ofu.tiles import EffectiveSizes, effective_sizes
from .short_name import short_name

if TYPE_CHECKING:
    from hardware_table import Accelerator

    from .parser import Subparsers

DEFAULT_DEVICE = "NVIDIA H100 80GB HBM3"
_NOTE = (
    "prediction: which kernel cuBLAS picks for these sizes is not known; these are shapes that public traces "
    "show. Read the kernel's name in a profile and pass it as --kernel."
)


def add_gemm(commands: Subparsers) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "gemm",
        help="extra work of a matrix multiplication in whole tiles, and its time at the peak",
        description="Sizes as torch's mm has them: [M, K] x [K, N]. M is tokens and N is out_features. "
        "cuBLAS sees the transpose: its m is N, its n is M.",
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
            raise ValueError(f"{name.upper()}={getattr(options, name)}: must be 1 or more")
    device = lookup(options.device)
    # For its check of the number format, which must not depend on whether the device is known.
    peak_flops(options.device, options.dtype)
    asked = _Asked(options.m, options.n, options.k, options.dtype, options.device, device)
    given = None if options.kernel is None else _kernel(options.kernel)
    kernels = candidate_kernels(_capability(device), asked.dtype_name) if given is None else (given,)
    rows = [(kernel, asked.in_tiles(kernel)) for kernel in kernels]
    # By what is known: the least extra work is no reason for cuBLAS to choose a small tile.
    rows.sort(key=lambda row: -row[0].tile.m * row[0].tile.n)
    if options.json:
        print(json.dumps(_as_json(asked, rows, predicted=given is None), indent=2))
    else:
        print(_report(asked, rows, predicted=given is None))
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
        raise ValueError(f"--kernel={name}: its tile is not known: {explain(name)}")
    return kernel


def _capability(device: Accelerator | None) -> str | None:
    # Compute capabilities of NVIDIA and AMD are numbered alike.
    return device.compute_capability if device is not None and device.vendor == "NVIDIA" else None


def _report(asked: _Asked, rows: list[tuple[GemmKernel, EffectiveSizes]], *, predicted: bool) -> str:
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
    table = text_table(header, [_row(asked, *row) for row in rows], left=(0, 7))
    if not predicted:
        return f"{heading}\n\n{table}"
    extra = sorted(sizes.flops / asked.flops - 1 for _, sizes in rows)
    return f"{heading}\n\n{table}\n\noverhead from {extra[0]:.2%} to {extra[-1]:.2%}; {_NOTE}"


def _row(asked: _Asked, kernel: GemmKernel, sizes: EffectiveSizes) -> tuple[str, ...]:
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


def _as_json(
    asked: _Asked, rows: list[tuple[GemmKernel, EffectiveSizes]], *, predicted: bool
) -> dict[str, object]:
    return {
        "m": asked.m,
        "n": asked.n,
        "k": asked.k,
        "dtype": asked.dtype,
        "device": asked.device_name,
        "flops": asked.flops,
        "peak_flops": asked.peak_flops,
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
