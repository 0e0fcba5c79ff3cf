"""What is kept of a fleet's samples: activity and clock of each GPU of each job, and what is refused."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from ..ofu.samples import MAX_ACTIVITY, Device, check_tensor_mhz, ofu_from_activity, tensor_clock
from .job_identity import JobNames

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]

RUN_GAP_S = 3600.0
"""Seconds without any sample of a job after which its name stands for another run: what is queued again after
a failure starts within it as a rule."""
MOST_MHZ, LEAST_MHZ = 5000.0, 30.0
"""No GPU works outside of them; what says so is in another unit than MHz."""
_NO_SHARE = "have a tensor activity above 1; is it in percent?"
_RATED = 1.01
"""A clock passes the limit of a device by rounding only."""

RunLabels: TypeAlias = tuple[tuple[str, str], ...]
"""Labels that part runs of one name, such as cluster, with their values."""


@dataclass
class DeviceSamples:
    """The samples of one GPU in one job, in the order of their times.

    Attributes:
        device: As the last sample names it: a host or an exporter may be renamed.
        tensor_mhz: Clock of its tensor peak in MHz; None when unknown.
        times: Unix times in seconds of the samples with a figure.
        activity: Tensor activity at these times, as a share.
        mhz: SM clock at these times in MHz.
        unused: Unix times of samples that OFU could not be told of.
        above: Number of samples whose activity was above 1.
    """

    device: Device
    tensor_mhz: float | None = None
    times: array[float] = field(default_factory=lambda: array("d"))
    activity: array[float] = field(default_factory=lambda: array("d"))
    mhz: array[float] = field(default_factory=lambda: array("d"))
    unused: array[float] = field(default_factory=lambda: array("d"))
    above: int = 0

    @property
    def ofu(self) -> Floats:
        """OFU of each sample with a figure, as a share."""
        import numpy as np

        if self.tensor_mhz is None:
            return np.array([])
        ofu: Floats = np.array(self.activity) * np.array(self.mhz) / self.tensor_mhz
        return ofu

    @property
    def seen(self) -> Sequence[float]:
        """Unix times of all samples in seconds, ascending."""
        return array("d", sorted(self.times + self.unused)) if self.unused else self.times

    def add(self, time_s: float, activity: float, mhz: float) -> None:
        """Keep a sample, unless there is one of that time: two exporters may show one GPU."""
        if (place := _place(self.times, time_s)) is None:
            return
        if (blank := bisect_left(self.unused, time_s)) < len(self.unused) and self.unused[blank] == time_s:
            del self.unused[blank]
        for values, value in ((self.times, time_s), (self.activity, activity), (self.mhz, mhz)):
            values.insert(place, value)

    def skip(self, time_s: float) -> None:
        """Keep that there was a sample without a figure."""
        if _place(self.times, time_s) is not None and (place := _place(self.unused, time_s)) is not None:
            self.unused.insert(place, time_s)

    def refuse_percent(self) -> int:
        """Refuse the rest where most activity is above 1, as it is in percent; return how many samples."""
        if self.above <= sum(share > 0 for share in self.activity):
            return 0
        refused = len(self.times)
        self.unused = array("d", self.seen)
        del self.times[:], self.activity[:], self.mhz[:]
        return refused

    def part(self, first: float, last: float) -> DeviceSamples:
        """Return the samples from one time to another, both included; not to be changed.

        All of them are not copied: they may be most of what the process has in memory.
        """
        if (seen := self.seen) and first <= seen[0] and seen[-1] <= last:
            return replace(self)
        low, high = bisect_left(self.times, first), bisect_right(self.times, last)
        blanks = slice(bisect_left(self.unused, first), bisect_right(self.unused, last))
        columns = (self.times[low:high], self.activity[low:high], self.mhz[low:high], self.unused[blanks])
        return DeviceSamples(self.device, self.tensor_mhz, *columns)

    def joined(self, other: DeviceSamples) -> DeviceSamples:
        """Return these and the samples of the same GPU in another place."""
        both = DeviceSamples(
            self.device, self.tensor_mhz if self.tensor_mhz is not None else other.tensor_mhz
        )
        for one in (self, other):
            for row in zip(one.times, one.activity, one.mhz, strict=True):
                both.add(*row)
            for time_s in one.unused:
                both.skip(time_s)
        return both


@dataclass
class JobSamples:
    """The samples of one job, or of all that had its name.

    Attributes:
        devices: By labels that part runs and `Device.identity`, in the order in which they came.
        labels: Those of a run.
    """

    devices: dict[tuple[RunLabels, tuple[str | None, ...]], DeviceSamples] = field(default_factory=dict)
    labels: RunLabels = ()

    @property
    def left_out(self) -> int:
        """Samples without a figure: activity, SM clock or tensor clock is missing, or was refused."""
        return sum(len(kept.unused) for kept in self.devices.values())

    def window(self) -> tuple[float, float] | None:
        """Return the Unix times of its first and last sample with a figure; None without one."""
        used = [kept.times for kept in self.devices.values() if kept.times]
        return (min(times[0] for times in used), max(times[-1] for times in used)) if used else None


@dataclass
class Refused:
    """Samples that cannot be true: their number, their jobs and one of the values."""

    samples: int = 0
    jobs: dict[str, None] = field(default_factory=dict)
    example: str = ""


@dataclass
class FleetSamples:
    """The samples of all jobs between two times.

    Attributes:
        start: Unix time in seconds.
        end: Unix time in seconds.
        step_s: Seconds between samples.
        tensor_mhz: Clock of the tensor peak in MHz, for all devices or by name; otherwise that of
            hardware-table.
        run_gap_s: Seconds without a sample after which the name of a job stands for another run.
        jobs: By name.
        unknown_models: Number of samples of devices whose tensor clock is not known, by the device's name.
        refused: Samples that cannot be true, by what is wrong with them.
        notes: What was missing, in sentences.
        names: How its jobs are named, and what is known of them; None: nothing is.
    """

    start: float
    end: float
    step_s: float
    tensor_mhz: float | Mapping[str, float] | None = None
    run_gap_s: float = RUN_GAP_S
    jobs: defaultdict[str, JobSamples] = field(default_factory=lambda: defaultdict(JobSamples))
    unknown_models: Counter[str] = field(default_factory=Counter)
    refused: defaultdict[str, Refused] = field(default_factory=lambda: defaultdict(Refused))
    notes: list[str] = field(default_factory=list)
    names: JobNames | None = None
    _clocks: dict[str | None, float | None] = field(default_factory=dict)
    _limits: dict[str | None, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.tensor_mhz
        for clock in given.values() if isinstance(given, Mapping) else () if given is None else (given,):
            check_tensor_mhz(clock)
        if isinstance(given, Mapping):
            self._clocks.update(given)
        if not self.run_gap_s > 0:
            raise ValueError(
                f"run_gap_s={self.run_gap_s!r} must be a positive number of seconds, such as 3600."
            )

    def add(
        self,
        job_name: str,
        device: Device,
        time_s: float,
        activity: float | None,
        mhz: float | None,
        run_labels: RunLabels = (),
    ) -> None:
        """Take one sample of a job's device; one that OFU cannot be told of is only counted.

        A device is its UUID, whatever host it is under. What cannot be true is refused and counted: a clock
        above the device's own limit, activity above 1, and OFU above 1.

        Args:
            job_name: Name of the job.
            device: Which one.
            time_s: Unix time in seconds.
            activity: Tensor activity as a share; None for none.
            mhz: SM clock in MHz; None for none.
            run_labels: What parts this run from others of the same name.

        Raises:
            ValueError: Activity or clock is negative or not finite.
        """
        kept = self._kept(job_name, device, run_labels)
        if kept.tensor_mhz is None:
            self.unknown_models[device.model or "a device without a name"] += 1
        if activity is None or mhz is None or kept.tensor_mhz is None:
            kept.skip(time_s)
            return
        ofu = ofu_from_activity(activity, mhz, kept.tensor_mhz)
        wrong = self._what_is_wrong(device.model, activity, mhz, ofu)
        if wrong is None:
            kept.add(time_s, activity, mhz)
            return
        kept.skip(time_s)
        kept.above += wrong[0] == _NO_SHARE
        refused = self.refused[wrong[0]]
        refused.samples += 1
        refused.jobs[job_name] = None
        refused.example = refused.example or wrong[1]

    def add_series(
        self,
        job_name: str,
        device: Device,
        times: Floats,
        activity: Floats,
        mhz: Floats,
        run_labels: RunLabels = (),
    ) -> None:
        """Take samples of a job's device, as `add` does with each of them.

        Args:
            job_name: Name of the job.
            device: Which one.
            times: Unix times in seconds, ascending.
            activity: Tensor activity at these times as a share; NaN for none.
            mhz: SM clock at these times in MHz; NaN for none.
            run_labels: What parts this run from others of the same name.

        Raises:
            ValueError: Activity or clock is negative or infinite.
        """
        import numpy as np

        kept = self._kept(job_name, device, run_labels)
        plain = np.zeros(len(times), bool)
        if kept.tensor_mhz is not None and all(
            own[-1] < times[0] for own in (kept.times, kept.unused) if own
        ):
            is_share = (activity >= 0) & (activity <= MAX_ACTIVITY) & (activity * mhz <= kept.tensor_mhz)
            works = (mhz >= LEAST_MHZ) | ((mhz >= 0) & (activity == 0))
            plain = is_share & works & (mhz <= self._limit_of(device.model))
            for own, values in ((kept.times, times), (kept.activity, activity), (kept.mhz, mhz)):
                own.frombytes(values[plain].tobytes())
        for place in np.flatnonzero(~plain):
            share, clock = (
                None if np.isnan(column[place]) else float(column[place]) for column in (activity, mhz)
            )
            self.add(job_name, device, float(times[place]), share, clock, run_labels)

    def runs(self) -> dict[str, dict[str, JobSamples]]:
        """Return the samples of each run by the name of the job and that of the run.

        The two are the same, but where a name stands for several runs: those are NAME#1, NAME#2, ... The
        samples are those of the fleet, and not to be changed.

        Raises:
            ModuleNotFoundError: numpy is not installed.
        """
        check_numpy()
        found = {}
        for name, seen in self.jobs.items():
            for kept in seen.devices.values():
                if kept.above and (more := kept.refuse_percent()):
                    self.refused[_NO_SHARE].samples += more
            parts = list(_runs(seen, self.run_gap_s))
            # Another job may be called so already.
            mark = "#"
            while any(f"{name}{mark}{number}" in self.jobs for number in range(1, len(parts) + 1)):
                mark += "#"
            found[name] = {
                name if len(parts) == 1 else f"{name}{mark}{number}": part
                for number, part in enumerate(parts, start=1)
            }
        return found

    def _kept(self, job_name: str, device: Device, run_labels: RunLabels) -> DeviceSamples:
        """Return the samples of a device, which is called as it is now."""
        seen = self.jobs[job_name].devices
        key = run_labels, device.identity
        kept = seen.get(key)
        if kept is None:
            kept = seen[key] = DeviceSamples(device)
        kept.device = device
        if kept.tensor_mhz is None:
            kept.tensor_mhz = self._tensor_mhz_of(device.model)
        return kept

    def _tensor_mhz_of(self, model: str | None) -> float | None:
        if isinstance(self.tensor_mhz, float | int):
            return self.tensor_mhz
        if model not in self._clocks:
            self._clocks[model] = None if model is None else tensor_clock(model).mhz
        return self._clocks[model]

    def _limit_of(self, model: str | None) -> float:
        if model not in self._limits:
            self._limits[model] = _limit_mhz(model)
        return self._limits[model]

    def _what_is_wrong(
        self, model: str | None, activity: float, mhz: float, ofu: float
    ) -> tuple[str, str] | None:
        """Return why a sample cannot be true, and its value; None if it can."""
        if mhz > (limit := self._limit_of(model)):
            reaches = (
                f"the {limit:.0f} MHz that {model} reaches" if limit < MOST_MHZ else f"{MOST_MHZ:.0f} MHz"
            )
            return f"have an SM clock above {reaches}; is it in MHz?", f"{mhz:g}"
        if mhz < LEAST_MHZ and activity > 0:
            return (
                f"have an SM clock below {LEAST_MHZ:.0f} MHz while the GPU works; is it in MHz?",
                f"{mhz:g}",
            )
        if activity > MAX_ACTIVITY:
            return _NO_SHARE, f"{activity:g}"
        if ofu > 1:
            return "have an OFU above 100 %; is the tensor clock theirs (--tensor-mhz)?", f"{ofu:.1%}"
        return None


def check_numpy() -> None:
    """Raise ModuleNotFoundError where numpy, which only figures of a fleet need, is not installed."""
    try:
        import numpy as np  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "figures of a fleet need numpy. Install it with `pip install 'perf-metrics[prometheus]'`."
        ) from error


def _limit_mhz(model: str | None) -> float:
    """Return the highest SM clock in MHz of a device, or what no device reaches."""
    # Imported here: the plain formulas must not need the table.
    from hardware_table import lookup

    record = None if model is None else lookup(model)
    if record is None or record.category != "data centre":
        return MOST_MHZ  # a board for desktops may be sold with a higher clock than its kind
    boost = record.boost_ghz or (record.clock_ghz if record.clock_kind == "boost" else None)
    return MOST_MHZ if boost is None else _RATED * 1000 * boost


def _place(times: array[float], time_s: float) -> int | None:
    """Return where a time goes; None if it is there."""
    if not times or times[-1] < time_s:  # nearly always
        return len(times)
    place = bisect_left(times, time_s)
    return None if times[place] == time_s else place


def _runs(seen: JobSamples, gap_s: float) -> Iterator[JobSamples]:
    """Yield what is of one run, in the order of their starts."""
    parts = []
    for labels, devices in _by_labels(seen):
        ends = sorted(end for kept in devices for end in _stretches(kept.seen, gap_s))
        joined: list[tuple[float, float]] = []
        for first, last in ends:
            if joined and first - joined[-1][1] <= gap_s:
                joined[-1] = joined[-1][0], max(joined[-1][1], last)
            else:
                joined.append((first, last))
        parts += [(first, last, labels, devices) for first, last in joined]
    for first, last, labels, devices in sorted(parts, key=lambda part: part[:3]):
        run = JobSamples(labels=labels)
        for kept in devices:
            part = kept.part(first, last)
            if not part.times and not part.unused:
                continue
            key = (), kept.device.identity
            if key in run.devices:
                run.devices[key] = run.devices[key].joined(part)
            else:
                run.devices[key] = part
        yield run


def _stretches(times: Sequence[float], gap_s: float) -> Iterator[tuple[float, float]]:
    """Yield first and last time of what no longer gap parts."""
    import numpy as np

    if not times:
        return
    ends = [times[0], times[-1]]
    if ends[1] - ends[0] > gap_s:
        for place in np.flatnonzero(np.diff(times) > gap_s).tolist():
            ends[-1:-1] = [times[place], times[place + 1]]
    yield from zip(ends[::2], ends[1::2], strict=True)


def _by_labels(seen: JobSamples) -> Iterable[tuple[RunLabels, list[DeviceSamples]]]:
    """Return the devices of each job of this name: those whose labels do not contradict one another."""
    groups: defaultdict[RunLabels, list[DeviceSamples]] = defaultdict(list)
    for (labels, _), kept in seen.devices.items():
        if kept.times or kept.unused:
            groups[labels].append(kept)
    if len(groups) < 2:
        return groups.items()
    found: list[tuple[dict[str, str], list[DeviceSamples]]] = []
    begins = {labels: min(kept.seen[0] for kept in devices) for labels, devices in groups.items()}
    for labels in sorted(groups, key=lambda one: (begins[one], one)):
        for known, devices in found:
            differing = {name for name, value in labels if known.get(name, value) != value}
            # A label may come with a new configuration; and a GPU is never in two clusters at once.
            if not differing or (differing == {"cluster"} and _share_a_gpu(devices, groups[labels])):
                known.update(labels)
                devices += groups[labels]
                break
        else:
            found.append((dict(labels), list(groups[labels])))
    return [(tuple(known.items()), devices) for known, devices in found]


def _share_a_gpu(some: Sequence[DeviceSamples], others: Sequence[DeviceSamples]) -> bool:
    """Whether a GPU is in both at the same time."""
    spans = [(kept.device.identity, kept.seen[0], kept.seen[-1]) for kept in some]
    return any(
        gpu == kept.device.identity and first <= kept.seen[-1] and kept.seen[0] <= last
        for gpu, first, last in spans
        for kept in others
    )
