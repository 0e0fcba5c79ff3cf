"""`perf-metrics trace`: where the time of a step goes, and what whole tiles add."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..display import format_value, text_table
from ..ofu.kernels import adjusted_ofu
from ..ofu.trace import KernelOverhead, LeftOut, TileOverheadReader, TraceOverhead
from ..traces.ranks import TraceBreakdown, compare_ranks, trace_paths
from ..traces.report import breakdown_as_json, breakdown_as_text
from ..traces.steps import RankSteps, StepReader
from ..traces.trace_file import TraceFile, TraceFileError
from .gemm import short_name

if TYPE_CHECKING:
    from . import OneLineParser

_NO_KERNELS = TraceOverhead(kernels=(), unreadable=(), without_sizes=(), plain_cores=(), device_seconds=0.0)


def fill_trace(parser: OneLineParser) -> None:
    """Add what `trace` takes."""
    parser.description = (
        "Show what the steps in traces of torch.profiler are spent on, rank by rank: computation, waiting "
        "for other ranks, the network, copies, saving, data and gaps of the host, and what is lost most. For "
        "kernels of a GPU also the tile overhead: a matrix multiplication computes whole tiles and clusters, "
        "more than was asked for. The tile is read from the kernel's name, the sizes from the operator: "
        "record the trace with record_shapes=True. What cannot be read is listed with its time."
    )
    parser.add_argument(
        "traces",
        nargs="+",
        type=Path,
        metavar="TRACE",
        help="what prof.export_chrome_trace wrote on one or all ranks, .json or .json.gz, or a directory of "
        "them, such as the profile/ of a run",
    )
    parser.add_argument("--ofu", type=float, metavar="SHARE", help="measured OFU to adjust, such as 0.45")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a bar for each rank, .png or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds, FLOPs and shares")
    parser.set_defaults(run=run_trace)


def run_trace(options: argparse.Namespace) -> int:
    """Print the tables.

    Raises:
        ValueError: A file is not a trace, the OFU is not between 0 and 1, or the picture is of another kind.
        OSError: A file cannot be read.
    """
    if options.ofu is not None:
        # Before the files, which may take long to read.
        adjusted_ofu(options.ofu, 0.0)
    if options.plot is not None:
        from ..logs.plot import check_suffix

        check_suffix(options.plot)
    breakdown, trace = _read(trace_paths(options.traces))
    if options.plot is not None:
        from ..traces.picture import plot_breakdown

        if isinstance(breakdown, str):
            raise TraceFileError(f"There is nothing to draw: {breakdown}")
        plot_breakdown(breakdown, options.plot)
    if options.json:
        told: object = None if isinstance(breakdown, str) else breakdown_as_json(breakdown)
        tiles = _trace_json(trace or _NO_KERNELS, options.ofu)
        print(json.dumps({"breakdown": told, **tiles}, indent=2))
        return 0
    print(
        f"step breakdown unavailable: {breakdown}"
        if isinstance(breakdown, str)
        else breakdown_as_text(breakdown)
    )
    if trace is not None:
        print(f"\n{_trace_report(trace, options.ofu)}")
    elif options.ofu is not None:
        print(f"\nadjusted OFU: unavailable: no kernels of a GPU; OFU {options.ofu:.2%}")
    return 0


def _read(paths: Sequence[Path]) -> tuple[TraceBreakdown | str, TraceOverhead | None]:
    """The breakdown, or why there is none, and the tile overhead of the first file that has kernels.

    Ranks run the same kernels, so that one of them tells the overhead. Each file is read once.
    """
    ranks: list[RankSteps] = []
    overhead: TraceOverhead | None = None
    reason = ""
    for path in paths:
        file, steps = TraceFile(path), StepReader()
        tiles = TileOverheadReader() if overhead is None else None
        for event in file.events():
            steps.add(event)
            if tiles is not None:
                tiles.add(event)
        if tiles is not None:
            overhead = tiles.overhead(file.header)
        try:
            ranks.append(steps.steps(file))
        except TraceFileError as error:
            if overhead is None:
                raise
            reason = str(error)
    return (reason if reason else compare_ranks(ranks)), overhead


def _trace_report(trace: TraceOverhead, ofu: float | None) -> str:
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
        f"{_share(trace, trace.plain_cores)} not on tensor cores",
        f"{trace.share(trace.other_seconds):.1%} of other kernels",
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
    grids = kernel.grids
    counts = {"agree": grids.agree, "DIFFER": grids.differ, "unchecked": grids.unchecked}
    return ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)


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


def _trace_json(trace: TraceOverhead, ofu: float | None) -> dict[str, object]:
    overhead = trace.overhead
    return {
        "device_seconds": trace.device_seconds,
        "other_seconds": trace.other_seconds,
        "overhead": overhead,
        "exact": trace.exact if trace.kernels else None,
        "flops": trace.flops,
        "effective_flops": trace.effective_flops,
        "ofu": ofu,
        "adjusted_ofu": None if ofu is None or overhead is None else adjusted_ofu(ofu, overhead),
        "kernels": [_kernel_json(trace, kernel) for kernel in trace.kernels],
        **{
            name: [_left_json(trace, kernel) for kernel in getattr(trace, name)]
            for name in ("unreadable", "without_sizes", "plain_cores")
        },
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
        "grids": asdict(kernel.grids),
    }


def _left_json(trace: TraceOverhead, kernel: LeftOut) -> dict[str, object]:
    return {**asdict(kernel), "time_share": trace.share(kernel.seconds)}
