"""`perf-metrics watch`: OFU of this node."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..display import format_value, text_table
from ..ofu.sampler import SHORTEST_INTERVAL_S, DeviceWindow, OFUSampler
from ..ofu.samples import check_tensor_mhz
from ..uncertainty import plus_minus

if TYPE_CHECKING:
    from . import OneLineParser

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
