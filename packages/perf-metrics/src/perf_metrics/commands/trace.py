"""`perf-metrics trace`: how much more than asked the matrix multiplications of a trace compute."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..display.format import format_value
from ..display.text_table import text_table
from ..ofu.tiles import adjusted_ofu
from ..ofu.trace import KernelOverhead, LeftOut, TraceOverhead, trace_overhead
from .short_name import short_name

if TYPE_CHECKING:
    from .parser import Subparsers


def add_trace(commands: Subparsers) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "trace",
        help="tile overhead of the kernels in a trace of torch.profiler, and adjusted OFU",
        description="A matrix multiplication computes whole tiles and clusters, more than was asked for. The "
        "tile is read from the kernel's name, the sizes from the operator: record the trace with "
        "record_shapes=True. What cannot be read is listed with its time.",
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="what prof.export_chrome_trace wrote; .json or .json.gz"
    )
    parser.add_argument("--ofu", type=float, metavar="SHARE", help="measured OFU to adjust, such as 0.45")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds, FLOPs and shares")
    parser.set_defaults(run=run_trace)


def run_trace(options: argparse.Namespace) -> int:
    """Print the tables.

    Raises:
        ValueError: The file is no trace with kernels, or the OFU is no share.
        OSError: The file cannot be read.
    """
    if options.ofu is not None:
        # Before the file, which may take long to read.
        adjusted_ofu(options.ofu, 0.0)
    trace = trace_overhead(options.file)
    print(json.dumps(_as_json(trace, options.ofu), indent=2) if options.json else _report(trace, options.ofu))
    return 0


def _report(trace: TraceOverhead, ofu: float | None) -> str:
    blocks = [_summary(trace, ofu)]
    if trace.kernels:
        blocks.append(_kernels(trace))
    mismatches = [kernel for kernel in trace.kernels if kernel.grids.differ]
    if mismatches:
        blocks.append(
            "launched grids that the formula does not give:\n" + "\n".join(map(_mismatch, mismatches))
        )
    for title, left_out in (
        ("not counted, tile not known:", trace.unreadable),
        ("not counted, sizes not known:", trace.without_sizes),
        ("not on tensor cores, so not in OFU:", trace.plain_cores),
    ):
        if left_out:
            blocks.append(f"{title}\n{_left_out(trace, left_out)}")
    return "\n\n".join(blocks)


def _summary(trace: TraceOverhead, ofu: float | None) -> str:
    parts = [
        f"{_share(trace, trace.kernels)} of {trace.device_seconds * 1e3:,.3f} ms of kernels counted",
        f"{_share(trace, trace.unreadable)} with a tile that is not known",
        f"{_share(trace, trace.without_sizes)} without sizes",
    ]
    lines = ["; ".join(parts)]
    if trace.overhead is None:
        lines.append("tile overhead: unavailable: no kernel has both a known tile and known sizes")
        if ofu is not None:
            lines.append(f"adjusted OFU: unavailable; OFU {ofu:.2%}")
        return "\n".join(lines)
    bound = "" if trace.exact else "at least "
    lines.append(
        f"tile overhead: {bound}{trace.overhead:.2%} ({_flop(trace.flops)} asked, "
        f"{_flop(trace.effective_flops)} computed)"
    )
    if ofu is not None:
        bound = "" if trace.exact else "at most "
        text = f"adjusted OFU: {bound}{adjusted_ofu(ofu, trace.overhead):.2%} (OFU {ofu:.2%})"
        if trace.unreadable or trace.without_sizes:
            text += ", as if the kernels not counted had the same overhead"
        lines.append(text)
    contradicted = [kernel for kernel in trace.kernels if kernel.grids.differ]
    if contradicted:
        share = _share(trace, contradicted)
        lines.append(f"in doubt: launched grids contradict the formula for kernels of {share} of the time")
    return "\n".join(lines)


def _flop(flops: int) -> str:
    return f"{format_value(float(flops), 'si')}FLOP"


def _kernels(trace: TraceOverhead) -> str:
    header = ("kernel", "calls", "ms", "share", "FLOP asked", "computed", "overhead", "exact", "grids")
    rows = [
        (
            short_name(kernel.kernel.name),
            f"{kernel.calls:,}",
            f"{kernel.seconds * 1e3:,.3f}",
            f"{trace.share(kernel.seconds):.1%}",
            format_value(float(kernel.flops), "si"),
            format_value(float(kernel.effective_flops), "si"),
            f"{kernel.overhead:.2%}",
            f"no: {kernel.inexact}" if kernel.inexact else "yes",
            _grids(kernel),
        )
        for kernel in trace.kernels
    ]
    return text_table(header, rows, left=(0, 7, 8))


def _grids(kernel: KernelOverhead) -> str:
    counts = (
        (kernel.grids.agree, "agree"),
        (kernel.grids.differ, "DIFFER"),
        (kernel.grids.unchecked, "unchecked"),
    )
    return ", ".join(f"{count:,} {word}" for count, word in counts if count)


def _mismatch(kernel: KernelOverhead) -> str:
    return (
        f"  {kernel.kernel.name}: {kernel.grids.differ:,} of {kernel.calls:,}, such as {kernel.grids.example}"
    )


def _left_out(trace: TraceOverhead, kernels: Sequence[LeftOut]) -> str:
    rows = [
        (
            short_name(kernel.name),
            f"{kernel.calls:,}",
            f"{kernel.seconds * 1e3:,.3f}",
            f"{trace.share(kernel.seconds):.1%}",
            kernel.reason,
        )
        for kernel in kernels
    ]
    return text_table(("kernel", "calls", "ms", "share", "why"), rows, left=(0, 4))


def _share(trace: TraceOverhead, kernels: Sequence[KernelOverhead] | Sequence[LeftOut]) -> str:
    return f"{trace.share(sum(kernel.seconds for kernel in kernels)):.1%}"


def _as_json(trace: TraceOverhead, ofu: float | None) -> dict[str, object]:
    overhead = trace.overhead
    return {
        "device_seconds": trace.device_seconds,
        "overhead": overhead,
        "exact": trace.exact if trace.kernels else None,
        "flops": trace.flops,
        "effective_flops": trace.effective_flops,
        "ofu": ofu,
        "adjusted_ofu": None if ofu is None or overhead is None else adjusted_ofu(ofu, overhead),
        "kernels": [_kernel_json(trace, kernel) for kernel in trace.kernels],
        "unreadable": [_left_json(trace, kernel) for kernel in trace.unreadable],
        "without_sizes": [_left_json(trace, kernel) for kernel in trace.without_sizes],
        "plain_cores": [_left_json(trace, kernel) for kernel in trace.plain_cores],
    }


def _kernel_json(trace: TraceOverhead, kernel: KernelOverhead) -> dict[str, object]:
    return {
        "name": kernel.kernel.name,
        "calls": kernel.calls,
        "seconds": kernel.seconds,
        "time_share": trace.share(kernel.seconds),
        "flops": kernel.flops,
        "effective_flops": kernel.effective_flops,
        "overhead": kernel.overhead,
        "exact": kernel.inexact is None,
        "inexact": kernel.inexact,
        "linear_pass": kernel.kernel.linear_pass,
        "grids": {
            "agree": kernel.grids.agree,
            "differ": kernel.grids.differ,
            "unchecked": kernel.grids.unchecked,
            "example": kernel.grids.example,
        },
    }


def _left_json(trace: TraceOverhead, kernel: LeftOut) -> dict[str, object]:
    return {
        "name": kernel.name,
        "reason": kernel.reason,
        "calls": kernel.calls,
        "seconds": kernel.seconds,
        "time_share": trace.share(kernel.seconds),
    }
