"""Reads dcgm-exporter's counters of errors and slowdowns out of Prometheus, of the GPUs that have any."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeAlias

from ..ofu.counter_files import device_of, present_labels
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
        persists: Whether the GPU keeps it over restarts, so that it never falls.
        least_per_s: Mean growth a second over an hour below which it says nothing.
        fails_per_s: From which on it is as serious as can be.
        fails_at: Value from which on it is as serious as can be, whether it grows or not.
    """

    kind: str
    names: tuple[str, ...]
    level: Level
    grows: bool = True
    persists: bool = False
    least_per_s: float = 0.0
    fails_per_s: float = math.inf
    fails_at: float = math.inf

    def query(self, selector: str, window_s: float, first: float, last: float) -> str:
        """Return PromQL for its values, a window apart, of the GPUs that it says something of."""
        return " or ".join(
            self._of_name(f'{name}{{UUID!=""{_and(selector)}}}', window_s, first, last) for name in self.names
        )

    def _of_name(self, series: str, window_s: float, first: float, last: float) -> str:
        latest = f"max by (UUID) (last_over_time({series}[{window(window_s)}]) < {_BLANK})"
        if not self.grows:
            return f"{latest} > 0"
        # Whole days of counters that stand still would be most of the answer.
        whole = f"{series}[{window(last - first + window_s)}] @ {last:.3f}"
        grew = f"{latest} and max by (UUID) (max_over_time({whole})) > min by (UUID) (min_over_time({whole}))"
        return grew if math.isinf(self.fails_at) else f"{grew} or {latest} >= {self.fails_at:g}"


_BLANK = 0x7FFFFFF0
"""From here on an integer of DCGM is a blank (`dcgm_structs.h`)."""
_XID_COUNT = "DCGM_EXP_XID_ERRORS_COUNT"
"""XID errors of the last minutes by the label `xid`; dcgm-exporter has it where it is asked for."""
_BACK = 2.5
"""Scrape intervals after which a series is taken to have ended: one or two scrapes may fail."""
_LONGEST_BACK_S = 300.0


_XID_NAMES = ("DCGM_FI_DEV_XID_ERROR", "DCGM_FI_DEV_XID_ERRORS")
SIGNALS = (
    Signal("uncorrectable ECC errors", ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",), "take out", fails_at=1),
    Signal(
        "memory rows remapped after uncorrectable errors",
        ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
        "watch",
        persists=True,
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
    "thermal slowdown": "clamp_max(floor({0} / 32) % 4, 1)",
    "power brake": "floor({0} / 128) % 2",
}
"""Bits of the reasons (`dcgm_fields.h`): 32 and 64 are thermal, 128 the power supply's brake. The power cap,
4, is usual under load."""


def window(seconds: float) -> str:
    """Return so much time before a point as PromQL has it."""
    # One millisecond less: up to version 2 of Prometheus both ends of the window belong to it.
    return f"{round(seconds * 1000) - 1}ms"


def counting_step(start: float, end: float, step_s: float) -> float:
    """Return the seconds between two looks at all GPUs: of a long range five minutes, as each has its cost.

    Args:
        start: Unix time in seconds.
        end: Unix time in seconds.
        step_s: Seconds between scrapes, which are not passed over in a short range.
    """
    return max(step_s, float(round(min(_LONGEST_BACK_S, (end - start) / 288))))


def _and(selector: str) -> str:
    return f",{selector}" if selector else ""


def lookback(
    server: PrometheusAPI, names: Sequence[str], selector: str, start: float, end: float, step_s: float
) -> float:
    """Return for how many seconds after a sample a series is there: two and a half scrape intervals.

    The interval is that of the tenth of all series with the fewest samples an hour, so that none are missed
    where nodes are scraped at unlike intervals. At least two and a half steps, and five minutes at most.

    Args:
        server: Where they are.
        names: Of the series.
        selector: Further matchers, or nothing.
        start: Unix time in seconds.
        end: Unix time in seconds.
        step_s: Seconds between the points that are asked for.
    """
    window_s = min(3600.0, end - start)
    # One name after the other: without their names, series of one GPU would be alike.
    counted = (f"count_over_time({name}{{{selector}}}[{window(window_s)}])" for name in names)
    query = f"quantile(0.1, {' or '.join(counted)})"
    counts: list[float] = []

    def read(first: float, last: float) -> int:
        answer = server.query_range(query, first, last, window_s)
        counts.extend(float(text) for series in answer for _, text in series.points)
        return sum(len(series.points) for series in answer)

    read_in_chunks(read, start + window_s, end, window_s, lambda _: None)
    usual = median(counts) if counts else 0.0
    interval_s = window_s / usual if usual else step_s
    return min(_LONGEST_BACK_S, _BACK * max(interval_s, step_s)) if step_s < _LONGEST_BACK_S else step_s


@dataclass
class HealthSamples:
    """What the counters of health say of GPUs; read it with `collect_gpu_health`.

    Attributes:
        start: Unix time in seconds.
        end: Unix time in seconds.
        window_s: Seconds of a window, at whose end values are.
        devices: GPUs by `Device.identity`, as they were last called.
        values: Of each counter by GPU and Unix time.
        reason_hours: Hours with a reason for low clocks by GPU and reason, and Unix time of the first window.
        xids: Unix time and code of each XID error in the range, in order, by GPU.
        earlier_xids: The last XID error before the range, by GPU, as far as it was not followed by another.
        counted_xids: Unix time of the first window by GPU and code, of errors that the exporter counted.
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
    counted_xids: dict[Identity, dict[int, float]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def gpus(self) -> set[Identity]:
        """Return all GPUs that something was read of."""
        told: list[Mapping[Identity, object]] = [self.xids, self.earlier_xids, self.counted_xids]
        return {gpu for of in (*told, *self.values.values(), *self.reason_hours.values()) for gpu in of}


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
    `DCGM_FI_DEV_CLOCKS_EVENT_REASONS` are not. The notes name what is missing. A GPU is its UUID; series
    without one are left out.

    Args:
        server: Where dcgm-exporter's series are.
        start: Unix time in seconds.
        end: Unix time in seconds, a step after `start` or more.
        selector: Further matchers for the series, such as `cluster="a"`.
        step_s: Seconds between scrapes.
        progress: Called with the seconds of the range that have been read more, for all counters together.

    Raises:
        ValueError: `start` is not a step before `end`.
        PrometheusError: The server did not give all of it.
    """
    if not end - start >= max(step_s, 1.0):
        raise ValueError(f"start={start!r} must be a step of {step_s:g} s before end={end!r}, or more.")
    # Whole seconds, which a query can say exactly; of the beginning, some seconds are left out for it.
    count = math.ceil((end - start) / 3600)
    found = HealthSamples(start, end, math.floor((end - start) / count))
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
        back_s = lookback(server, reasons, selector, start, end, step_s)
        for reason, expression in _REASONS.items():
            reader.read_reason(reason, expression, reasons, back_s, part)
    if has_xids:
        reader.read_xids(part)
    if _XID_COUNT in found.exported:
        reader.read_counted_xids()
    if not passes:
        progress(end - start)
    reader.name_gpus()
    found.notes += _notes(found)
    return found


@dataclass
class _Reader:
    server: PrometheusAPI
    found: HealthSamples
    selector: str
    step_s: float

    def read_names(self) -> None:
        names = [*_XID_NAMES, _XID_COUNT, *_REASON_NAMES, *(name for one in SIGNALS for name in one.names)]
        window_s = self.found.window_s
        matchers = f'__name__=~"{"|".join(names)}"{_and(self.selector)}'
        query = f"group by (__name__) (last_over_time({{{matchers}}}[{window(window_s)}]))"

        def read(first: float, last: float) -> int:
            answer = self.server.query_range(query, first, last, window_s)
            self.found.exported.update(name for one in answer if (name := one.labels.get("__name__")))
            return sum(len(one.points) for one in answer)

        self._in_windows(read)

    def read_signal(self, signal: Signal, progress: Progress) -> None:
        values = self.found.values.setdefault(signal.kind, defaultdict(dict))
        window_s = self.found.window_s

        def read(first: float, last: float) -> int:
            # From the window before on: growth is seen against it.
            before = first - window_s if signal.grows else first
            query = signal.query(self.selector, window_s, before, last)
            count = 0
            for gpu, _, time_s, value in self._ask(query, before, last, window_s):
                values[gpu][time_s] = value
                count += 1
            return count

        self._in_windows(read, progress)

    def read_reason(
        self, reason: str, expression: str, names: Sequence[str], back_s: float, progress: Progress
    ) -> None:
        hours = self.found.reason_hours.setdefault(reason, {})
        window_s = self.found.window_s
        look_s = counting_step(self.found.start, self.found.end, self.step_s)
        steps = f"[{window(window_s)}:{round(look_s * 1000)}ms]"
        latest = [
            f'(last_over_time({name}{{UUID!=""{_and(self.selector)}}}[{window(back_s)}]) < {_BLANK})'
            for name in names
        ]
        # The number of steps, and not their share: a series may have begun within the window.
        query = " or ".join(
            f"sum_over_time((max by (UUID) ({expression.format(one)})){steps}) > 0" for one in latest
        )

        def read(first: float, last: float) -> int:
            count = 0
            for gpu, _, time_s, number in self._ask(query, first, last, window_s):
                before, since = hours.get(gpu, (0.0, math.inf))
                hours[gpu] = before + number * look_s / 3600, min(since, time_s - window_s)
                count += 1
            return count

        self._in_windows(read, progress)

    def read_xids(self, progress: Progress) -> None:
        found, step = self.found, self.step_s

        def latest(seconds: float, offset: str = "", gpus: str = 'UUID!=""') -> str:
            matchers = f'__name__=~"{"|".join(_XID_NAMES)}",{gpus}{_and(self.selector)}'
            return f"max by (UUID) (last_over_time({{{matchers}}}[{window(seconds)}]{offset}) < {_BLANK})"

        last: dict[Identity, int] = {}
        for gpu, _, _, code in self._ask(latest(3600), found.start, found.start, step):
            last[gpu] = int(code)
        found.earlier_xids = {gpu: code for gpu, code in last.items() if code}
        with_errors = self._gpus_with_xids(progress)
        back_s = lookback(self.server, _XID_NAMES, self.selector, found.start, found.end, step)
        for some in _uuid_matchers(with_errors):
            now = latest(back_s, gpus=some)
            before = latest(back_s, f" offset {round(step * 1000)}ms", some)

            def read(first: float, until: float, query: str = f"{now} unless ({now} == {before})") -> int:
                # The gauge keeps the last error; only where it changes, to 0 as well, is something new.
                changes = list(self._ask(query, first, until, step))
                for gpu, _, time_s, value in sorted(changes, key=lambda one: one[2]):
                    self._xid_changed(last, gpu, time_s, int(value))
                return len(changes)

            read_in_chunks(read, found.start + step, found.end, step, lambda _: None)

    def _gpus_with_xids(self, progress: Progress) -> set[str]:
        """Return the UUIDs of GPUs whose gauge is not always 0: few, so that all can be read of them."""
        window_s = self.found.window_s
        told = {uuid for gpu in self.found.earlier_xids if (uuid := gpu[0])}
        queries = []
        for name in _XID_NAMES:
            series = f'{name}{{UUID!=""{_and(self.selector)}}}[{window(window_s)}]'
            most = f"max by (UUID) (max_over_time({series}))"
            queries.append(f"{most} > 0")

        def read(first: float, last: float) -> int:
            count = 0
            for gpu, _, _, _ in self._ask(" or ".join(queries), first, last, window_s):
                told.add(gpu[0] or "")
                count += 1
            return count

        self._in_windows(read, progress)
        return told

    def _xid_changed(self, last: dict[Identity, int], gpu: Identity, time_s: float, code: int) -> None:
        found = self.found
        # The first value of all says nothing of when; an exporter that is back says the last one again.
        if gpu not in last:
            found.earlier_xids |= {gpu: code} if code else {}
        elif code != last[gpu]:
            found.earlier_xids.pop(gpu, None)
            if code:
                found.xids.setdefault(gpu, []).append((time_s, code))
        last[gpu] = code

    def read_counted_xids(self) -> None:
        window_s = self.found.window_s
        series = f'{_XID_COUNT}{{UUID!=""{_and(self.selector)}}}'
        query = f"max by (UUID, xid) (max_over_time({series}[{window(window_s)}])) > 0"

        def read(first: float, last: float) -> int:
            count = 0
            for gpu, labels, time_s, _ in self._ask(query, first, last, window_s):
                if (code := labels.get("xid", "")).isdigit():
                    self.found.counted_xids.setdefault(gpu, {}).setdefault(int(code), time_s - window_s)
                count += 1
            return count

        self._in_windows(read)

    def name_gpus(self) -> None:
        """Find out what the GPUs were last called."""
        found, names = self.found, "|".join(sorted(self.found.exported))
        called: dict[Identity, float] = {}
        for some in _uuid_matchers({uuid for gpu in found.gpus() if (uuid := gpu[0])}):
            matchers = f'__name__=~"{names}",{some}{_and(self.selector)}'
            labels = "UUID, gpu, Hostname, hostname, modelName"
            query = f"group by ({labels}) (last_over_time({{{matchers}}}[{window(found.window_s)}]))"

            def read(first: float, last: float, query: str = query) -> int:
                answer = self.server.query_range(query, first, last, found.window_s)
                for series in answer:
                    device = device_of(present_labels(series.labels))
                    time_s = series.points[-1][0] if series.points else 0.0
                    if time_s >= called.get(device.identity, 0.0):
                        called[device.identity], found.devices[device.identity] = time_s, device
                return sum(len(series.points) for series in answer)

            self._in_windows(read)

    def _in_windows(self, read: _Read, progress: Progress = lambda seconds: None) -> None:
        window_s, end = self.found.window_s, self.found.end
        count = math.floor((end - self.found.start) / window_s + 1e-6)
        # Half a window more, so that rounding loses none.
        read_in_chunks(read, end - (count - 1) * window_s, end + window_s / 2, window_s, progress)

    def _ask(
        self, query: str, first: float, last: float, step_s: float
    ) -> Iterator[tuple[Identity, Mapping[str, str], float, float]]:
        for series in self.server.query_range(query, first, last, step_s):
            device = Device(uuid=series.labels.get("UUID"))
            for time_s, text in series.points:
                if math.isfinite(value := float(text)) and value >= 0:
                    yield device.identity, series.labels, time_s, value


_UUIDS_AT_ONCE = 100


def _uuid_matchers(uuids: set[str]) -> Iterator[str]:
    """Yield matchers for some GPUs at a time."""
    ordered = sorted(uuids)
    for place in range(0, len(ordered), _UUIDS_AT_ONCE):
        some = "|".join(map(re.escape, ordered[place : place + _UUIDS_AT_ONCE])).replace("\\", "\\\\")
        yield f'UUID=~"{some}"'


_Read: TypeAlias = Callable[[float, float], int]


def _notes(found: HealthSamples) -> Iterator[str]:
    kinds = [_XID_NAMES[::-1], _REASON_NAMES, *(signal.names for signal in SIGNALS)]
    unseen = [" or ".join(dict.fromkeys(names)) for names in kinds if not set(names) & found.exported]
    if unseen:
        yield f"health of GPUs is judged without what is not exported here: {', '.join(unseen)}"
