"""OFU of one job over its GPU time, how even its devices are, and which of them is odd."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_low
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..ofu.samples import Device
from ..uncertainty import MeanInterval, mean_interval
from .job_samples import DeviceSamples, JobSamples
from .regressions import Drop, find_drops

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Numbers: TypeAlias = npt.NDArray[np.int64]

_NEIGHBOURS = 4
"""Gaps on either side that tell the spacing around a sample: of nine, four may be outages."""
_FEWEST = 5
"""Samples from which on those of a device tell their own spacing."""
_SAME_CELL = 1e-3
"""Share of a step by which a time may pass a multiple of the step: servers round times to milliseconds."""


def usual_gap(times: Sequence[float]) -> float:
    """Return the median of the seconds between samples; NaN for fewer than two."""
    import numpy as np

    return float(np.median(np.diff(times))) if len(times) > 1 else math.nan


def seconds_of(times: Sequence[float] | Floats, usual_s: float) -> Floats:
    """Return the seconds before each sample that it stands for: the spacing of the samples around it.

    Counters are averages over the time before a sample, so that one scraped every two minutes stands for four
    times as long as one scraped every thirty seconds, and one after an outage for no longer than the next.

    Args:
        times: Unix times in seconds, ascending.
        usual_s: Spacing to assume where there are too few samples to tell one.
    """
    import numpy as np

    gaps = np.diff(times)
    if len(times) < _FEWEST:
        return np.array([usual_s, *np.minimum(usual_s, gaps)][: len(times)])
    least = gaps.min()
    if gaps.max() - least <= _SAME_CELL * least:
        return np.full(len(times), np.median(gaps))
    spacing = _median_around(gaps)
    for place in np.flatnonzero(gaps > spacing):
        # An outage, after which scrapes may be rarer or more frequent than before.
        after = gaps[place + 1 : place + 1 + _NEIGHBOURS].tolist()
        spacing[place] = median_low(after or [spacing[place]])
    return np.concatenate(([median_low(gaps[:_NEIGHBOURS].tolist())], spacing))


def _median_around(gaps: Floats) -> Floats:
    """Return the low median of each value and its neighbours, fewer of them near an end."""
    import numpy as np

    width = 2 * _NEIGHBOURS + 1
    near = [
        median_low(gaps[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1].tolist())
        for place in (*range(_NEIGHBOURS), *range(max(_NEIGHBOURS, len(gaps) - _NEIGHBOURS), len(gaps)))
    ]
    if len(gaps) < width:
        return np.array(near)
    windows = np.lib.stride_tricks.sliding_window_view(gaps, width)
    inner = np.partition(windows, _NEIGHBOURS, axis=1)[:, _NEIGHBOURS]
    return np.concatenate((near[:_NEIGHBOURS], inner, near[_NEIGHBOURS:]))


def cells(
    times: Sequence[float], seconds: Sequence[float], start: float, step_s: float
) -> Iterator[tuple[int, int, float]]:
    """Yield number of a step after `start`, place of a sample, and the seconds of the step it stands for."""
    for place, (time_s, length) in enumerate(zip(times, seconds, strict=True)):
        end = (time_s - start) / step_s
        begin = end - length / step_s
        first, last = math.floor(begin + _SAME_CELL) + 1, math.ceil(end - _SAME_CELL)
        if first >= last:
            yield last, place, length
            continue
        for number in range(first, last + 1):
            low = begin if number == first else number - 1
            yield number, place, ((end if number == last else number) - low) * step_s


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean; of no weight at all NaN."""
    total = math.fsum(weights)
    products = (value * weight for value, weight in zip(values, weights, strict=True))
    return math.fsum(products) / total if total else math.nan


def weighted_percentiles(
    values: Sequence[float] | Floats, weights: Sequence[float] | Floats, shares: Sequence[float]
) -> list[float]:
    """Return percentiles of one value or more, on the line between neighbours.

    A value stands in the middle of its weight. With equal weights the lowest is at 0 and the highest at 1.
    """
    import numpy as np

    values, weights = np.asarray(values), np.asarray(weights)
    order = np.lexsort((weights, values))
    ordered, weight = values[order], weights[order]
    places = np.cumsum(weight) - weight / 2
    wanted = places[0] + np.array(shares) * (places[-1] - places[0])
    found: list[float] = np.interp(wanted, places, ordered).tolist()
    return found


@dataclass(frozen=True, eq=False)
class Span:
    """The samples of one GPU in one job: their times, OFU and seconds."""

    times: Floats
    ofu: Floats
    seconds: Floats


def time_of_one_gpu(spans: Sequence[Span], start: float, step_s: float) -> tuple[float, float]:
    """Return the seconds of a GPU in all of its jobs, and the sum of OFU x seconds.

    What jobs share of it counts once.
    """
    import numpy as np

    ordered = sorted((span for span in spans if len(span.times)), key=lambda span: span.times[0])
    if all(earlier.times[-1] < later.times[0] for earlier, later in pairwise(ordered)):
        return (
            math.fsum(span.seconds.sum() for span in ordered),
            math.fsum(span.ofu @ span.seconds for span in ordered),
        )
    # In any step a GPU can be busy for no longer than the step.
    sums = _by_step(ordered, start, step_s)
    lengths = np.minimum(sums.seconds, step_s)
    return float(lengths.sum()), float(sums.means() @ lengths)


OddKind: TypeAlias = Literal["slow clock", "less work"]

SLOW_CLOCK = 0.90
"""Share of the median SM clock of the job below which a device is slow: those of healthy GPUs of one job lie
within a few percent (H100 under load: mean 1352 MHz, standard deviation 32; same paper)."""
LESS_WORK = 0.80
"""Share of the median OFU of the job below which a device does less than the others."""
BUSY = 0.05
"""Mean tensor activity from which on a device is one under load, so that its clock says something."""
_FEWEST_TO_COMPARE = 3
_ALL_ITS_TIME = 0.9
"""Share of the time of a job over which devices are compared as they are."""


@dataclass(frozen=True)
class Spread:
    """OFU over the time of all devices of a job, as shares: mean and percentiles."""

    mean: float
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class DeviceFigures:
    """One device within a job.

    Attributes:
        device: Which one.
        ofu: Mean over its time, as a share.
        tensor_activity: Mean, as a share.
        sm_mhz: Mean SM clock in MHz.
        samples: Number of samples.
        seconds: Time that they stand for.
    """

    device: Device
    ofu: float
    tensor_activity: float
    sm_mhz: float
    samples: int
    seconds: float


@dataclass(frozen=True)
class OddDevice:
    """A device that is unlike the others of its job.

    Attributes:
        kind: "slow clock": a straggler. Where ranks wait for one another all do the same work in the same
            time, so that its OFU is about that of the others; its clock is lower and its tensor activity
            higher. "less work": its OFU is lower, with a clock like the others'.
        figures: Of the device.
        share: Its clock, or its OFU, as a share of the median of those it was compared with.
    """

    kind: OddKind
    figures: DeviceFigures
    share: float


@dataclass(frozen=True)
class JobFigures:
    """What the counters say of one job.

    Attributes:
        job: Its name.
        start: Unix time of its first sample in seconds.
        end: Unix time of its last sample in seconds.
        cut: Whether it reaches an end of the range that was asked for, so that it may be longer.
        samples: Number of samples in the figures.
        left_out: Number of samples without activity or clock.
        devices: Of each device that it had at any time.
        spans: Samples of each of them, in the same order.
        interval_s: Seconds between the samples of a device; NaN without two of one.
        gpus: Number of devices that it had at a time, also of those without a figure: the median over time.
        ofu: None when there is no sample.
        imbalance: (highest - lowest) / mean of the OFU of the devices that had the job for half as long as
            any other, or longer; each is compared with the others at the same times. None for fewer than two,
            or without work.
        odd_devices: Those that are unlike the others of the same model at the same times; none where there
            are fewer than three.
        drops: Where OFU fell and stayed low.
        times: Unix times of the series in seconds, a step apart where there is no gap.
        series: Mean OFU of the devices in the step before.
        gpu_seconds: Their time in that step, all of them together.
        interval: The mean OFU with its confidence interval, of the series: GPUs of one job are not
            independent. None without samples.
    """

    job: str
    start: float
    end: float
    cut: bool
    samples: int
    left_out: int
    devices: tuple[DeviceFigures, ...]
    spans: tuple[Span, ...]
    interval_s: float
    gpus: int
    ofu: Spread | None
    imbalance: float | None
    odd_devices: tuple[OddDevice, ...]
    drops: tuple[Drop, ...]
    times: tuple[float, ...]
    series: tuple[float, ...]
    gpu_seconds: tuple[float, ...]
    interval: MeanInterval | None = None

    @property
    def device_hours(self) -> float:
        """Hours that the samples of all devices stand for."""
        return math.fsum(device.seconds for device in self.devices) / 3600


def job_figures(job: str, seen: JobSamples, start: float, end: float, step_s: float) -> JobFigures:
    """Return the figures of one job.

    Args:
        job: Its name.
        seen: Its samples.
        start: Start of the range that was asked for, Unix time in seconds.
        end: End of that range.
        step_s: Seconds between samples.
    """
    import numpy as np

    used = [kept for kept in seen.devices.values() if kept.times]
    gaps = [gap for kept in used if math.isfinite(gap := usual_gap(kept.times))]
    interval_s = median(gaps) if gaps else math.nan
    spacing = interval_s if gaps else step_s
    spans = tuple(Span(np.array(kept.times), kept.ofu, seconds_of(kept.times, spacing)) for kept in used)
    devices = tuple(_device(kept, span) for kept, span in zip(used, spans, strict=True))
    sums = _by_step(spans, start, step_s)
    steps = np.flatnonzero(sums.seconds)
    times = tuple((start + (sums.first + steps) * step_s).tolist())
    series = tuple(sums.means()[steps].tolist())
    gpu_seconds = tuple(sums.seconds[steps].tolist())
    first, last = seen.window() or (math.nan, math.nan)
    alike = _at_the_same_times(devices, used, spans, start, step_s)
    return JobFigures(
        job=job,
        start=first,
        end=last,
        cut=bool(times) and (first - start < step_s or end - last < step_s),
        samples=sum(device.samples for device in devices),
        left_out=seen.left_out,
        devices=devices,
        spans=spans,
        interval_s=interval_s,
        gpus=_devices_at_a_time(seen, spacing, start, step_s),
        ofu=spread(
            np.concatenate([np.array([]), *(span.ofu for span in spans)]),
            np.concatenate([np.array([]), *(span.seconds for span in spans)]),
        ),
        imbalance=_imbalance([device.ofu for device, _ in alike]),
        odd_devices=tuple(
            replace(odd, figures=of)
            for odd in odd_devices([device for device, _ in alike])
            for device, of in alike
            if device is odd.figures
        ),
        drops=find_drops(times, series),
        times=times,
        series=series,
        gpu_seconds=gpu_seconds,
        interval=mean_interval(series, weights=gpu_seconds, step_s=step_s) if series else None,
    )


def spread(values: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> Spread | None:
    """Return mean and percentiles of what each stands for so many seconds; None of nothing."""
    if not len(values):
        return None
    low, middle, high = weighted_percentiles(values, seconds, (0.1, 0.5, 0.9))
    return Spread(_mean(values, seconds), low, middle, high)


def _mean(values: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> float:
    import numpy as np

    total = float(np.sum(seconds))
    return float(np.dot(values, seconds)) / total if total else math.nan


@dataclass(frozen=True)
class _StepSums:
    """The seconds of all devices in each step from the `first` on, and the sums of value x seconds."""

    first: int
    seconds: Floats
    products: Floats

    def means(self) -> Floats:
        """Mean value in each step; 0 where no device was."""
        import numpy as np

        return np.divide(self.products, self.seconds, out=np.zeros(len(self.seconds)), where=self.seconds > 0)


def _by_step(spans: Sequence[Span], start: float, step_s: float) -> _StepSums:
    import numpy as np

    parts = [(span, *_cells(span.times, span.seconds, start, step_s)) for span in spans]
    first, count = _range_of(numbers for _, numbers, _, _ in parts)
    sums = _StepSums(first, np.zeros(count), np.zeros(count))
    for span, numbers, places, seconds in parts:
        work = span.ofu[places] * seconds
        for total, values in ((sums.seconds, seconds), (sums.products, work)):
            total += np.bincount(numbers - first, values, count)
    return sums


def _cells(
    times: Floats, seconds: Floats, start: float, step_s: float
) -> tuple[Numbers, Numbers | slice, Floats]:
    """Return what `cells` yields, as columns."""
    import numpy as np

    ends = (times - start) / step_s
    last = np.ceil(ends - _SAME_CELL)
    if (np.floor(ends - seconds / step_s + _SAME_CELL) + 1 >= last).all():  # nearly always
        return last.astype(np.int64), slice(None), seconds
    numbers, places, lengths = zip(*cells(times.tolist(), seconds.tolist(), start, step_s), strict=True)
    return np.array(numbers), np.array(places), np.array(lengths)


def _range_of(columns: Iterable[Numbers]) -> tuple[int, int]:
    """Return the lowest number and how many there are up to the highest."""
    ends = [(int(numbers.min()), int(numbers.max())) for numbers in columns if len(numbers)]
    first = min((low for low, _ in ends), default=0)
    return first, max((high + 1 for _, high in ends), default=0) - first


def _devices_at_a_time(seen: JobSamples, spacing: float, start: float, step_s: float) -> int:
    import numpy as np

    columns = []
    for kept in seen.devices.values():
        times = np.array(kept.seen)
        columns.append(_cells(times, seconds_of(times, spacing), start, step_s)[0])
    first, count = _range_of(columns)
    devices = np.zeros(count, np.int64)
    for numbers in columns:
        devices[np.unique(numbers) - first] += 1
    ordered = np.sort(devices[devices > 0])
    return int(ordered[len(ordered) // 2]) if len(ordered) else 0


def _at_the_same_times(
    devices: Sequence[DeviceFigures],
    used: Sequence[DeviceSamples],
    spans: Sequence[Span],
    start: float,
    step_s: float,
) -> list[tuple[DeviceFigures, DeviceFigures]]:
    """Return the devices that are compared, each as if it had had all of the job's time, and as it is.

    Of a job that fell when it continued elsewhere, the later devices do less than the earlier ones, and no
    less than their job.
    """
    longest = max((device.seconds for device in devices), default=0.0)
    import numpy as np

    # A node that was swapped out after minutes tells little of the job.
    usual = [place for place, device in enumerate(devices) if 2 * device.seconds >= longest]
    times = [spans[place].times for place in usual]
    lasts = max((of[-1] for of in times), default=0.0) - min((of[0] for of in times), default=0.0)
    if all(of[-1] - of[0] >= _ALL_ITS_TIME * lasts for of in times):
        return [(devices[place], devices[place]) for place in usual]
    models: defaultdict[tuple[str | None, str | None], list[int]] = defaultdict(list)
    for place in usual:
        models[_model(devices[place])].append(place)
    found = {}
    for places in models.values():
        columns = [
            (spans[place].ofu, np.array(used[place].activity), np.array(used[place].mhz)) for place in places
        ]
        for number in range(3):
            of_group = [
                Span(spans[place].times, column[number], spans[place].seconds)
                for place, column in zip(places, columns, strict=True)
            ]
            sums = _by_step(of_group, start, step_s)
            for place, span in zip(places, of_group, strict=True):
                found[place, number] = _scaled(span, sums, start, step_s)
    return [
        (
            replace(
                devices[place],
                ofu=devices[place].ofu * found[place, 0],
                tensor_activity=devices[place].tensor_activity * found[place, 1],
                sm_mhz=devices[place].sm_mhz * found[place, 2],
            ),
            devices[place],
        )
        for place in usual
    ]


def _scaled(span: Span, sums: _StepSums, start: float, step_s: float) -> float:
    """Return the mean over all times, over that at the times of one device; 1 where there was no work."""
    numbers, _, seconds = _cells(span.times, span.seconds, start, step_s)
    there = _mean(sums.means()[numbers - sums.first], seconds)
    return float(sums.products.sum() / sums.seconds.sum()) / there if there > 0 else 1.0


def odd_devices(devices: Sequence[DeviceFigures]) -> list[OddDevice]:
    """Return the devices that are unlike the others of their model in their job."""
    models: defaultdict[tuple[str | None, str | None], list[DeviceFigures]] = defaultdict(list)
    for device in devices:
        models[_model(device)].append(device)
    return [odd for alike in models.values() for odd in _odd_among(alike)]


def _odd_among(devices: Sequence[DeviceFigures]) -> list[OddDevice]:
    if len(devices) < _FEWEST_TO_COMPARE:
        return []
    usual_mhz = median(device.sm_mhz for device in devices)
    usual_ofu = median(device.ofu for device in devices)
    usual_activity = median(device.tensor_activity for device in devices)
    found = []
    for device in devices:
        # Stages of a pipeline, and a GPU that works alone, have clocks of their own, and an OFU of their own.
        waited_for = usual_activity >= BUSY and abs(device.ofu - usual_ofu) <= (1 - LESS_WORK) * usual_ofu
        slow = device.sm_mhz < SLOW_CLOCK * usual_mhz and device.tensor_activity > usual_activity
        if slow and waited_for:
            found.append(OddDevice("slow clock", device, device.sm_mhz / usual_mhz))
        elif device.ofu < LESS_WORK * usual_ofu:
            found.append(OddDevice("less work", device, device.ofu / usual_ofu))
    return found


def _device(kept: DeviceSamples, span: Span) -> DeviceFigures:
    import numpy as np

    columns = (span.ofu, np.array(kept.activity), np.array(kept.mhz))
    ofu, activity, mhz = (_mean(column, span.seconds) for column in columns)
    return DeviceFigures(kept.device, ofu, activity, mhz, len(kept.times), float(span.seconds.sum()))


def _model(device: DeviceFigures) -> tuple[str | None, str | None]:
    return device.device.model, device.device.mig_profile


def _imbalance(means: Sequence[float]) -> float | None:
    total = math.fsum(means)
    return (max(means) - min(means)) * len(means) / total if len(means) > 1 and total else None
