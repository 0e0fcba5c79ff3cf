"""Output of `dcgmi dmon`, for instance `dcgmi dmon -e 100,1004 -d 1000`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .samples import Device, Readings, Sample, check_activity

TENSOR = "TENSO"
"""Field 1004, any tensor pipe, as a share of cycles (`dcgm_fields.h` of DCGM 4.6.0)."""
CLOCK = "SMCLK"
"""Field 100, SM clock in MHz."""
_NOT_INSTEAD = {
    "THMMA": "THMMA counts the half-precision pipe alone",
    "MMACACT": "MMACACT is a running count whose scale is not documented",
    "SMCELAP": "SMCELAP is a running count whose scale is not documented",
    "SMACT": "SMACT is the activity of whole SMs",
}
_ENTITY = re.compile(r"\s*(GPU|GPU-I|GPU-CI)\s+(\d+)\s")
_OTHER_ENTITY = re.compile(r"\s*([A-Za-z][\w-]*)\s+\d+\s")
_BLANK = "N/A"


def read_dmon(
    source: str | os.PathLike[str] | Iterable[str],
    *,
    host: str | None = None,
    start_s: float | None = None,
    interval_s: float | None = None,
) -> Readings:
    """Read what `dcgmi dmon` has printed.

    Columns may stand in any order, and headers may repeat or change. A MIG slice ("GPU-I 21") keeps DCGM's
    number for it; the output does not say on which GPU it lies. A last line without its end is left out: half
    a number looks like a number.

    Args:
        source: Path of a file, or a text stream or other lines.
        host: Name of the node, which the output does not have.
        start_s: Unix time of the first rows in seconds; the output has no times.
        interval_s: Seconds from one block of rows to the next (`-d` of dcgmi is in milliseconds).

    Returns:
        The samples of GPUs and slices, with notes on columns that are missing or not used.

    Raises:
        ValueError: There is no header, or only one of `start_s` and `interval_s` is given.
    """
    if (start_s is None) != (interval_s is None):
        raise ValueError(f"start_s={start_s!r} and interval_s={interval_s!r}: give both, or neither")
    lines = _Lines(host)
    for line in _lines(source):
        lines.take(line)
    if not lines.columns:
        raise ValueError("no header that begins with #Entity: this is not the output of dcgmi dmon")
    times = None if start_s is None or interval_s is None else (start_s, interval_s)
    samples = tuple(row.sample(times) for row in lines.rows)
    return Readings(samples, tuple(_notes(lines)))


def _lines(source: str | os.PathLike[str] | Iterable[str]) -> Iterator[str]:
    if isinstance(source, str | os.PathLike):
        with Path(source).open(encoding="utf-8", errors="replace") as stream:
            yield from stream
    else:
        yield from source


@dataclass(frozen=True, slots=True)
class _Row:
    device: Device
    block: int
    activity: float | None
    clock: float | None

    def sample(self, times: tuple[float, float] | None) -> Sample:
        time = None if times is None else times[0] + self.block * times[1]
        return Sample(self.device, self.activity, self.clock, time)


@dataclass
class _Lines:
    host: str | None
    columns: list[tuple[str, int]] = field(default_factory=list)
    seen: dict[str, None] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    devices: dict[tuple[str, str], Device] = field(default_factory=dict)
    last_place: int = -1
    block: int = 0
    blank: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)
    with_ends: bool = False
    torn: bool = False

    def take(self, line: str) -> None:
        if line.lstrip().startswith("#"):
            # Newer versions print "#Entity", older ones "# Entity".
            start = line.index("#") + 1
            names = [(match[0], start + match.start()) for match in re.finditer(r"\S+", line[start:])]
            self.columns = names[1:]
            self.seen.update(dict.fromkeys(name for name, _ in self.columns))
        elif (entity := _ENTITY.match(line)) is None:
            self._pass_over(line)
        elif self.with_ends and not line.endswith("\n"):
            self.torn = True
        else:
            self._add(entity, line)
        self.with_ends = line.endswith("\n")

    def _pass_over(self, line: str) -> None:
        other = _OTHER_ENTITY.match(line)
        if other is not None and self.columns:
            self.others[other[1]] += 1
        elif line.strip() and line.split()[0].upper() != "ID":
            self.unread.append(line.strip())

    def _add(self, entity: re.Match[str], line: str) -> None:
        cells = self._cells(line, line[entity.end() :].split())
        if cells is None:
            self.unread.append(line.strip())
            return
        device = self._device(entity[1], entity[2])
        # Rows come in the same order in each block, and one may be missing.
        place = list(self.devices).index((entity[1], entity[2]))
        self.block += place <= self.last_place
        self.last_place = place
        activity, clock = self._number(cells, TENSOR), self._number(cells, CLOCK)
        if activity is not None and check_activity(activity) is None:
            self.wrong[TENSOR] += 1
            activity = None
        self.rows.append(_Row(device, self.block, activity, clock))

    def _cells(self, line: str, words: list[str]) -> dict[str, str] | None:
        # dcgmi begins values where their header begins (DeviceMonitor.cpp); a name may hold spaces.
        # Text that was copied from elsewhere has the words and not the places.
        starts = [start for _, start in self.columns]
        if all(start < len(line) and line[start - 1] == " " != line[start] for start in starts):
            words = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        elif len(words) != len(starts):
            return None
        return dict(zip((name for name, _ in self.columns), words, strict=True))

    def _device(self, kind: str, number: str) -> Device:
        if (kind, number) not in self.devices:
            self.devices[kind, number] = (
                Device(host=self.host, index=number)
                if kind == "GPU"
                else Device(host=self.host, mig_instance=f"{kind} {number}")
            )
        return self.devices[kind, number]

    def _number(self, cells: dict[str, str], column: str) -> float | None:
        text = cells.get(column)
        if text is None:
            return None
        if text == _BLANK:
            self.blank[column] += 1
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            self.wrong[column] += 1
            return None
        return value


def _notes(lines: _Lines) -> Iterator[str]:
    if TENSOR not in lines.seen:
        instead = "; ".join(text for name, text in _NOT_INSTEAD.items() if name in lines.seen)
        yield f"no column {TENSOR}: run dcgmi dmon with field 1004" + (f" ({instead})" if instead else "")
    if CLOCK not in lines.seen:
        yield f"no column {CLOCK}: run dcgmi dmon with field 100; without the SM clock there is no OFU"
    unused = [name for name in lines.seen if name not in (TENSOR, CLOCK)]
    if unused:
        yield f"columns not used: {', '.join(unused)}"
    for column, count in lines.blank.items():
        yield f"{column}: {count} of {len(lines.rows)} values are {_BLANK}"
    for column, count in lines.wrong.items():
        unit = "a share from 0 to 1" if column == TENSOR else "a number of MHz"
        yield f"{column}: {count} of {len(lines.rows)} values are not {unit} and were left out"
    if any(device.is_slice for device in lines.devices.values()) and any(
        not device.is_slice for device in lines.devices.values()
    ):
        yield "there are rows of GPUs and of slices; a slice's work is in its GPU's row too: average one kind"
    if lines.others:
        yield f"rows that are not of GPUs: {', '.join(lines.others)}"
    if lines.unread:
        yield f"{len(lines.unread)} lines do not fit the header, the first: {lines.unread[0]!r}"
    if lines.torn:
        yield "the last line has no end and was left out"
