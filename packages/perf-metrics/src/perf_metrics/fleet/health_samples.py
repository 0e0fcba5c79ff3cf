"""Reads dcgm-exporter's counters of errors and slowdowns out of Prometheus, of the GPUs that have any."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..ofu.counter_files import blank_reason, device_of, present_labels
from ..ofu.samples import Device
from .prometheus_api import Progress, PrometheusAPI, read_in_chunks

Level: TypeAlias = Literal["take out", "watch", "note"]
Identity: TypeAlias = tuple[str | None, ...]
"""That of a GPU: `Device.identity`."""


@dataclass(frozen=True)
class Signal:
    """A counter of dcgm-exporter and what it says; limits are those of DCGM's own health checks.

    They are in DCGM's `modules/health/DcgmHealthWatch.cpp` and `common/DcgmGPUHardwareLimits.h`.

    Attributes:
        kind: What it counts.
        names: Of the series, since DCGM 4.6.0 and before.
        level: How serious it is.
        grows: Whether it counts, so that its growth matters; else that it is not 0 does.
        least_per_s: Mean growth a second over an hour below which it says nothing.
        fails_per_s: From which on it is as serious as can be.
        fails_at: Value from which on it is as serious as can be.
    """

    kind: str
    names: tuple[str, ...]
    level: Level
    grows: bool = True
    least_per_s: float = 0.0
    fails_per_s: float = math.inf
    fails_at: float = math.inf

    def query(self, selector: str, window_s: float, first: float, last: float) -> str:
        """Return PromQL for its values, a window apart, of the GPUs that it says something of."""
        return " or ".join(
            self._of_name(f"{name}{{{selector}}}", window_s, first, last) for name in self.names
        )

    def _of_name(self, series: str, window_s: float, first: float, last: float) -> str:
        if not self.grows:
            return f"max by ({_BY}) (max_over_time({series}[{window(window_s)}])) > 0"
        # Whole days of counters that stand still would be most of the answer.
        whole = f"{series}[{window(last - first + window_s)}] @ {last:.3f}"
        return (
            f"max by ({_BY}) (last_over_time({series}[{window(window_s)}])) and "
            f"max by ({_BY}) (max_over_time({whole})) > min by ({_BY}) (min_over_time({whole}))"
        )


_BY = "UUID, gpu, Hostname, hostname, modelName"
_XID_NAMES = ("DCGM_FI_DEV_XID_ERROR", "DCGM_FI_DEV_XID_ERRORS")
SIGNALS = (
    Signal("uncorrectable ECC errors", ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",), "take out"),
    Signal(
        "memory rows remapped after uncorrectable errors",
        ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
        "watch",
        fails_at=512,
    ),
    Signal(
        "remapping of memory rows failed",
        ("DCGM_FI_DEV_ROW_REMAP_FAILED", "DCGM_FI_DEV_ROW_REMAP_FAILURE"),
        "take out",
        grows=False,
    ),
    Signal(
        "remapping of memory rows waits for a reset", ("DCGM_FI_DEV_ROW_REMAP_PENDING",), "watch", grows=False
    ),
    Signal(
        "NVLink replays",
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL", "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
        "take out",
    ),
    Signal(
        "NVLink recoveries",
        ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_TOTAL", "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
        "take out",
    ),
    Signal(
        "NVLink CRC errors in flits",
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL", "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
        "watch",
        fails_per_s=100,
    ),
    Signal(
        "NVLink CRC errors in data",
        ("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_TOTAL", "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
        "watch",
        fails_per_s=100,
    ),
    # Expected are 0.06 a minute, lane and GT/s: 31 of the fifth generation with 16 lanes.
    Signal(
        "PCIe replays",
        ("DCGM_FI_DEV_PCIE_REPLAY_TOTAL", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),
        "watch",
        least_per_s=31 / 60,
    ),
)
_REASON_NAMES = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
_REASONS = {
    "thermal slowdown": "clamp_max(floor({0} / 32) % 2 + floor({0} / 64) % 2, 1)",
    "power brake": "floor({0} / 128) % 2",
}
"""Bits of the reasons (`dcgm_fields.h`): 32 and 64 are thermal, 128 the power supply's brake. The power cap,
4, is usual under load."""


def window(seconds: float) -> str:
    """Return so much time before a point as PromQL has it."""
    # One millisecond less: up to version 2 of Prometheus both ends of the window belong to it.
    return f"{round(seconds * 1000) - 1}ms"


@dataclass
class HealthSamples:
    """What the counters of health say of GPUs; read it with `collect_gpu_health`.

    Attributes:
        start: Unix time in seconds.
        end: Unix time in seconds.
        window_s: Seconds of a window, at whose end values are.
        devices: GPUs by `Device.identity`.
        values: Of each counter by GPU and Unix time.
        reason_hours: Hours with a reason for low clocks by GPU and reason, and Unix time of the first window.
        xids: Unix time and code of each XID error in the range, in order, by GPU.
        earlier_xids: The last XID error before the range, by GPU.
        exported: Names of the counters that some GPU has.
        notes: What was missing, in sentences.
    """

    start: float
    end: float
    window_s: float
    devices: dict[Identity, Device] = field(default_factory=dict)
    values: dict[str, dict[Identity, dict[float, float]]] = field(default_factory=dict)
    reason_hours: dict[str, dict[Identity, tuple[float, float]]] = field(default_factory=dict)
    xids: dict[Identity, list[tuple[float, int]]] = field(default_factory=dict)
    earlier_xids: dict[Identity, int] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def collect_gpu_health(
    server: PrometheusAPI,
    start: float,
    end: float,
    *,
    selector: str = "",
    step_s: float = 30.0,
    progress: Progress = lambda seconds: None,
) -> HealthSamples:
    """Return what dcgm-exporter's counters of errors and slowdowns say of all GPUs between two times.

    The server does most of the work: what is read are the GPUs whose counters grew, an hour apart, and the
    times at which the XID error changed. Which counters there are depends on the exporter's list: XID errors,
    remapped rows and PCIe replays are on it by default (`etc/default-counters.csv`); ECC, NVLink and
    `DCGM_FI_DEV_CLOCKS_EVENT_REASONS` are not. The notes name what is missing.

    Args:
        server: Where dcgm-exporter's series are.
        start: Unix time in seconds.
        end: Unix time in seconds, after `start`.
        selector: Further matchers for the series, such as `cluster="a"`.
        step_s: Seconds between scrapes.
        progress: Called with the seconds of the range that have been read more, for all counters together.

    Raises:
        ValueError: `start` is not before `end`.
        PrometheusError: The server did not give all of it.
    """
    if not start < end:
        raise ValueError(f"start={start!r} must be before end={end!r}, in Unix time.")
    found = HealthSamples(start, end, (end - start) / math.ceil((end - start) / 3600))
    reader = _Reader(server, found, selector, step_s)
    reader.read_names()
    wanted = [signal for signal in SIGNALS if found.exported & set(signal.names)]
    reasons = [name for name in _REASON_NAMES if name in found.exported]
    has_xids = bool(found.exported & set(_XID_NAMES))
    passes = len(wanted) + len(_REASONS) * bool(reasons) + has_xids

    def part(seconds: float) -> None:
        progress(seconds / passes)

    for signal in wanted:
        reader.read_signal(signal, part)
    if reasons:
        for reason, expression in _REASONS.items():
            reader.read_reason(reason, expression, reasons, part)
    if has_xids:
        reader.read_xids(part)
    if not passes:
        progress(end - start)
    found.notes += _notes(found, reader.blanks)
    return found


_Read: TypeAlias = Callable[[float, float], int]


@dataclass
class _Reader:
    server: PrometheusAPI
    found: HealthSamples
    selector: str
    step_s: float
    blanks: Counter[str] = field(default_factory=Counter)

    def read_names(self) -> None:
        names = "|".join([*_XID_NAMES, *_REASON_NAMES, *(name for one in SIGNALS for name in one.names)])
        matchers = ",".join([f'__name__=~"{names}"', *([self.selector] if self.selector else [])])
        window_s = self.found.window_s
        query = f"group by (__name__) (last_over_time({{{matchers}}}[{window(window_s)}]))"

        def read(first: float, last: float) -> int:
            answer = self.server.query_range(query, first, last, window_s)
            self.found.exported.update(name for one in answer if (name := one.labels.get("__name__")))
            return sum(len(one.points) for one in answer)

        read_in_chunks(read, self.found.start + window_s, self.found.end, window_s, lambda _: None)

    def read_signal(self, signal: Signal, progress: Progress) -> None:
        values = self.found.values.setdefault(signal.kind, defaultdict(dict))
        window_s = self.found.window_s

        def read(first: float, last: float) -> int:
            # From the window before on: growth is seen against it.
            before = first - window_s if signal.grows else first
            query = signal.query(self.selector, window_s, before, last)
            count = 0
            for identity, time_s, value in self._ask(query, before, last, window_s, signal.names[0]):
                kept = values[identity]
                kept[time_s] = max(value, kept.get(time_s, value))  # under two names of one host
                count += 1
            return count

        self._in_windows(read, progress)

    def read_reason(self, reason: str, expression: str, names: Sequence[str], progress: Progress) -> None:
        hours = self.found.reason_hours.setdefault(reason, {})
        window_s = self.found.window_s
        steps = f"[{window(window_s)}:{round(self.step_s * 1000)}ms]"
        latest = [f"last_over_time({name}{{{self.selector}}}[{window(self.step_s)}])" for name in names]
        # The number of steps, and not their share: a series may have begun within the window.
        query = " or ".join(
            f"max by ({_BY}) (sum_over_time(({expression.format(one)}){steps})) > 0" for one in latest
        )

        def read(first: float, last: float) -> int:
            count = 0
            for identity, time_s, number in self._ask(query, first, last, window_s, names[0]):
                before, since = hours.get(identity, (0.0, math.inf))
                hours[identity] = before + number * self.step_s / 3600, min(since, time_s - window_s)
                count += 1
            return count

        self._in_windows(read, progress)

    def read_xids(self, progress: Progress) -> None:
        found, step = self.found, window(self.step_s)
        names = f'__name__=~"{"|".join(_XID_NAMES)}"'
        matchers = ",".join([names, *([self.selector] if self.selector else [])])
        now = f"max by ({_BY}) (last_over_time({{{matchers}}}[{step}]))"
        before = (
            f"max by ({_BY}) (last_over_time({{{matchers}}}[{step}] offset {round(self.step_s * 1000)}ms))"
        )
        for identity, _, code in self._ask(f"{now} > 0", found.start, found.start, self.step_s, names):
            found.earlier_xids[identity] = int(code)

        def read(first: float, last: float) -> int:
            count = 0
            # The gauge keeps the last error; only where it changes is there a new one.
            changes = self._ask(f"({now} > 0) unless ({now} == {before})", first, last, self.step_s, names)
            for identity, time_s, code in sorted(changes, key=lambda one: one[1]):
                count += 1
                seen = found.xids.setdefault(identity, [])
                latest = seen[-1][1] if seen else found.earlier_xids.get(identity)
                if int(code) != latest:  # the exporter was away, and is back
                    seen.append((time_s, int(code)))
            return count

        read_in_chunks(read, found.start + self.step_s, found.end, self.step_s, progress)

    def _in_windows(self, read: _Read, progress: Progress) -> None:
        window_s = self.found.window_s
        read_in_chunks(read, self.found.start + window_s, self.found.end, window_s, progress)

    def _ask(
        self, query: str, first: float, last: float, step_s: float, name: str
    ) -> Iterator[tuple[Identity, float, float]]:
        for series in self.server.query_range(query, first, last, step_s):
            device = device_of(present_labels(series.labels))
            self.found.devices[device.identity] = device
            for time_s, text in series.points:
                value = float(text)
                if blank_reason(name, value) is not None:
                    self.blanks[name] += 1
                else:
                    yield device.identity, time_s, value


def _notes(found: HealthSamples, blanks: Mapping[str, int]) -> Iterator[str]:
    missing = [_XID_NAMES[1], _REASON_NAMES[0], *(signal.names[-1] for signal in SIGNALS)]
    kinds = [set(_XID_NAMES), set(_REASON_NAMES), *(set(signal.names) for signal in SIGNALS)]
    unseen = [name for name, names in zip(missing, kinds, strict=True) if not names & found.exported]
    if unseen:
        yield (
            "health of GPUs is judged without what dcgm-exporter does not export here: " + ", ".join(unseen)
        )
    for name, count in blanks.items():
        yield f"{count} values of {name} are blank or negative and left out"
