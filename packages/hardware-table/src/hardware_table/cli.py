"""The console script `hardware-table`: list the table, show a record, detect the running device."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn, TextIO

from rich_argparse import RawDescriptionRichHelpFormatter

from hardware_table.detection import DetectedDevice, detect
from hardware_table.hardware_file import default_config_path, record_detected
from hardware_table.matching import accelerators, match
from hardware_table.records import DTYPES, Accelerator, canonical_dtype
from hardware_table.resolve import ResolvedPeak, resolve_peak
from hardware_table.table import load_table, normalise

_LABEL = 20
_WIDTH = 100
_WIDEST = 1000
"""Rows stay on one line: cut ones cannot be compared."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name; None means those of this process.

    Returns:
        Exit status: 0; 1 if `detect` cannot tell because torch is missing; 2 for bad input.
    """
    try:
        options = _parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status: int = options.run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Keep the interpreter from flushing into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"hardware-table: {error}", file=sys.stderr)
        return 2
    return status


class _Help(RawDescriptionRichHelpFormatter):
    text_markup = help_markup = False  # square brackets are text


class _Parser(argparse.ArgumentParser):
    def __init__(self, *, formatter_class: Any = _Help, **options: Any) -> None:
        super().__init__(formatter_class=formatter_class, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See --help.\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Imported here: it takes longer than all the rest of a help text.
        from importlib.metadata import version

        print(f"hardware-table {version('hardware-table')}")
        parser.exit()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # The line of code that warned means nothing to somebody at a shell.
    print(f"hardware-table: {message}", file=file or sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hardware-table",
        description="Dense peak FLOP/s of accelerators, with the derivation and source of each figure.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list the table", description="List the table, in TFLOP/s.")
    listing.add_argument(
        "--arch", metavar="NAME", help="architecture, chip or capability: Hopper, GH100, 9.0"
    )
    listing.add_argument(
        "--dtype", metavar="DTYPE", help=f"only devices with this format: {', '.join(DTYPES)}"
    )
    listing.set_defaults(run=_list)
    show = commands.add_parser("show", help="show all that is known of a device")
    show.add_argument("name", metavar="NAME", help="device name as torch gives it, such as 'NVIDIA A10G'")
    show.add_argument("--units", type=int, metavar="N", help="SMs, CUs or EUs that the device reports")
    show.set_defaults(run=_show)
    finding = commands.add_parser("detect", help="show the device of this machine and the peaks in use")
    finding.add_argument(
        "--index", type=int, metavar="N", help="index of the device (default: the current one)"
    )
    finding.add_argument(
        "--config", type=Path, metavar="FILE", help="hardware.yaml (default: the user's own)"
    )
    finding.set_defaults(run=_detect)
    for command in (listing, show, finding):
        command.add_argument("--json", action="store_true", help="write JSON, in FLOP/s and bytes per second")
    return parser


def _list(options: argparse.Namespace) -> int:
    dtype = None if options.dtype is None else canonical_dtype(options.dtype)
    records = [record for record in accelerators() if dtype is None or record.peak(dtype)]
    if options.arch is not None:
        records = _of_architecture(records, options.arch)
    if options.json:
        print(json.dumps([_record_dict(record) for record in records], indent=2))
    else:
        print("\n".join(_table_lines(records, DTYPES if dtype is None else (dtype,))))
    return 0


def _of_architecture(records: list[Accelerator], wanted: str) -> list[Accelerator]:
    def terms(record: Accelerator) -> set[str]:
        known = (record.architecture, record.chip, record.compute_capability)
        return {term.casefold() for term in known if term}

    if not any(wanted.casefold() in terms(record) for record in accelerators()):
        names = ", ".join(dict.fromkeys(record.architecture for record in accelerators()))
        raise ValueError(
            f"--arch {wanted!r} is not in the table. Use one of {names}, a chip or a capability."
        )
    return [record for record in records if wanted.casefold() in terms(record)]


def _show(options: argparse.Namespace) -> int:
    record, reason = match(options.name, options.units)
    if record is None:
        raise ValueError(f"no record for {options.name!r}: {reason}.{_suggestion(options.name)}")
    print(json.dumps(_record_dict(record), indent=2) if options.json else "\n".join(_record_lines(record)))
    return 0


def _suggestion(name: str) -> str:
    import difflib

    wanted = normalise(name)
    if wanted in load_table().by_name:
        return " Give the full name of one, or --units."
    names = {normalise(record.name): record.name for record in accelerators()}
    words = set(wanted.split())
    close = [known for known in names if words and words <= set(known.replace("-", " ").split())]
    close = close or difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    return f" Similar names: {', '.join(names[known] for known in close[:5])}." if close else ""


def _detect(options: argparse.Namespace) -> int:
    import importlib.util

    device = detect(options.index)
    if device is None:
        has_torch = importlib.util.find_spec("torch") is not None
        if options.json:
            print("null")
        elif has_torch:
            print("No CUDA, ROCm or XPU device here: the peak is unknown.")
        return 0 if has_torch else 1
    path = options.config or default_config_path()
    peaks = [resolve_peak(device, dtype, config_path=path) for dtype in DTYPES]
    if options.json:
        print(json.dumps({**asdict(device), "peaks": [asdict(peak) for peak in peaks]}, indent=2))
    else:
        print("\n".join((*_device_lines(device), *_peak_lines(peaks, path))))
    record_detected(path, device)
    return 0


def _record_dict(record: Accelerator) -> dict[str, object]:
    """Give a record as plain values: FLOP/s and bytes per second."""
    values = asdict(record)
    for peak in values["peaks"]:
        peak["derived"] = record.derived_flops(peak["dtype"])
    return values


def _table_lines(records: Sequence[Accelerator], dtypes: Sequence[str]) -> Iterator[str]:
    """Lay records out as a table: one line each, dense TFLOP/s by number format."""
    header = ["device", "arch", "units", "GHz", *dtypes, "GB/s", "confidence"]
    rows = [[*_row(record, dtypes)] for record in records]
    yield from _text_table(header, rows, left=(0, 1, len(header) - 1))
    yield ""
    yield "Dense TFLOP/s per device; 16-bit formats with FP32 accumulation; int8 in TOP/s. '-': not known."


def _row(record: Accelerator, dtypes: Sequence[str]) -> Iterator[str]:
    yield record.name
    yield record.architecture
    yield "-" if record.units is None else f"{record.units} {record.unit_kind}"
    yield "-" if record.clock_ghz is None else f"{record.clock_ghz:g}"
    for dtype in dtypes:
        yield _tera(record.peak_flops(dtype))
    yield "/".join(dict.fromkeys(f"{entry.bandwidth / 1e9:g}" for entry in record.memory)) or "-"
    yield record.confidence


def _record_lines(record: Accelerator) -> Iterator[str]:
    """Lay out all that is known of one record."""
    yield record.name
    if record.aliases:
        yield from _field("also reported as", ", ".join(record.aliases))
    chip = f" ({record.chip})" if record.chip else ""
    yield from _field("device", f"{record.vendor} {record.architecture}{chip}, {record.category}")
    if record.compute_capability:
        yield from _field("compute capability", record.compute_capability)
    yield from _field(
        "units", "not published" if record.units is None else f"{record.units} {record.unit_kind}s"
    )
    clock = "not published" if record.clock_ghz is None else f"{record.clock_ghz:g} GHz ({record.clock_kind})"
    boost = f", boost {record.boost_ghz:g} GHz" if record.boost_ghz else ""
    yield from _field("clock", clock + boost)
    for entry in record.memory:
        size = f" ({entry.gigabytes:g} GB)" if entry.gigabytes else ""
        yield from _field("memory bandwidth", f"{entry.bandwidth / 1e9:g} GB/s{size}")
    yield ""
    rows = [
        (
            peak.dtype,
            _tera(peak.flops),
            _tera(peak.published),
            _tera(record.derived_flops(peak.dtype)),
            "-" if peak.flops_per_cycle is None else str(peak.flops_per_cycle),
        )
        for peak in record.peaks
    ]
    header = ("dtype", "TFLOP/s", "published", "derived", f"FLOPs/cycle/{record.unit_kind}")
    yield from (f"  {line}" for line in _text_table(header, rows, left=(0, 4)))
    yield ""
    yield from _field("confidence", record.confidence)
    yield from _field("source", record.source)
    for label, text in (("why", record.why), ("note", record.note)):
        if text:
            yield from _field(label, text)
    for reference in record.references:
        yield from _field("", reference)


def _device_lines(device: DetectedDevice) -> Iterator[str]:
    """Lay out what torch says of a device."""
    yield device.name
    yield from _field("backend", f"{device.backend}, device {device.index}")
    yield from _field("units", str(device.units))
    yield from _field("memory", f"{device.total_memory / 1e9:.1f} GB")
    if device.compute_capability:
        yield from _field("compute capability", device.compute_capability)


def _peak_lines(peaks: Sequence[ResolvedPeak], path: Path) -> Iterator[str]:
    """Lay out the peaks in use and where each is from."""
    known = [peak for peak in peaks if peak.flops is not None]
    if not known:
        yield from _field("peak", next(peak.explanation for peak in peaks if peak.dtype == "bf16"))
    for peak in known:
        yield from _field(peak.dtype, f"{_tera(peak.flops)} TFLOP/s, {peak.explanation}")
    yield from _field("file", str(path))


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=_WIDEST)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _field(label: str, text: str) -> list[str]:
    indent = " " * (_LABEL + 2)
    lines = wrap(text, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [f"  {label:{_LABEL}}{line}" if i == 0 else indent + line for i, line in enumerate(lines)]


def _tera(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e12:.6g}"
