"""The console script `hardware-table`: list the table, show a record, detect the running device."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, TextIO

from hardware_table.detected import record_detected
from hardware_table.detection import detect
from hardware_table.dtypes import DTYPES, canonical_dtype
from hardware_table.matching import accelerators, match
from hardware_table.names import normalise
from hardware_table.records import Accelerator
from hardware_table.report import device_lines, peak_lines, record_dict, record_lines, table_lines
from hardware_table.resolve import resolve_peak
from hardware_table.table import load_table
from hardware_table.userfile import default_config_path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name; None means those of this process.

    Returns:
        Exit status: 0; 1 if `detect` cannot tell because torch is missing; 2 for bad input.
    """
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Keep the interpreter from flushing into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"hardware-table: {error}", file=sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


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
        print(json.dumps([record_dict(record) for record in records], indent=2))
    else:
        print("\n".join(table_lines(records, DTYPES if dtype is None else (dtype,))))
    return 0


def _of_architecture(records: list[Accelerator], wanted: str) -> list[Accelerator]:
    def terms(record: Accelerator) -> set[str]:
        known = (record.architecture, record.chip, record.compute_capability)
        return {term.casefold() for term in known if term}

    if not any(wanted.casefold() in terms(record) for record in accelerators()):
        names = ", ".join(dict.fromkeys(record.architecture for record in accelerators()))
        raise ValueError(f"--arch {wanted!r} is not in the table; use one of {names}, a chip or a capability")
    return [record for record in records if wanted.casefold() in terms(record)]


def _show(options: argparse.Namespace) -> int:
    record, reason = match(options.name, options.units)
    if record is None:
        raise ValueError(f"no record for {options.name!r}: {reason}{_suggestion(options.name)}")
    print(json.dumps(record_dict(record), indent=2) if options.json else "\n".join(record_lines(record)))
    return 0


def _suggestion(name: str) -> str:
    import difflib

    wanted = normalise(name)
    if wanted in load_table().by_name:
        return "; give the full name of one, or --units"
    names = {normalise(record.name): record.name for record in accelerators()}
    words = set(wanted.split())
    close = [known for known in names if words and words <= set(known.replace("-", " ").split())]
    close = close or difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    return f"; similar names: {', '.join(names[known] for known in close[:5])}" if close else ""


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
        print("\n".join((*device_lines(device), *peak_lines(peaks, path))))
    record_detected(path, device)
    return 0
