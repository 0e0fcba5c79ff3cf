"""What the GPUs of a synthetic job do: tensor activity and SM clock of each at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from .synthetic_plan import SCRAPE_S, Host, Job

TENSOR_MHZ = 1830
USUAL_MHZ, SLOW_MHZ, MHZ_SD, LEAST_MHZ, MOST_MHZ = 1352, 900, 32, 1201, 1558
"""SM clock of H100s under load, as published; 900 MHz is that of the slow one."""
_SCRAPE_MS = 1000 * SCRAPE_S


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU or a MIG slice of it, as the exporter names it."""

    host: Host
    index: int
    mig_profile: str = ""
    mig_instance: str = ""

    @property
    def whole(self) -> GPU:
        """The GPU that it is a slice of, or itself."""
        return GPU(self.host, self.index)

    def __str__(self) -> str:
        parts = (self.host.name, f"GPU {self.index}", f"{self.mig_instance} {self.mig_profile}".strip())
        return ", ".join(part for part in parts if part)


@dataclass
class Counters:
    """The readings of one device in one job.

    Attributes:
        gpu: The device.
        times_ms: Unix times in milliseconds, ascending.
        activity: Share of cycles with tensor instructions.
        mhz: SM clock in MHz.
        blank: What is blank, by place: "activity", "new name" (not under the old name) or "clock".
        has_clock: Whether the clock is exported.
    """

    gpu: GPU
    times_ms: list[int] = field(default_factory=list)
    activity: list[float] = field(default_factory=list)
    mhz: list[int] = field(default_factory=list)
    blank: dict[int, str] = field(default_factory=dict)
    has_clock: bool = True

    def ofu(self, first_ms: int, last_ms: int) -> Iterator[tuple[int, float, int]]:
        """Yield place, OFU as a share and clock of the samples that can be used, from one time to another."""
        if not self.has_clock:
            return
        for place, time_ms in enumerate(self.times_ms):
            if first_ms <= time_ms <= last_ms and self.blank.get(place) not in ("activity", "clock"):
                yield place, self.activity[place] * self.mhz[place] / TENSOR_MHZ, self.mhz[place]

    def part(self, first_ms: int) -> Counters:
        """Return the readings from a time on."""
        skipped = sum(time_ms < first_ms for time_ms in self.times_ms)
        blank = {place - skipped: what for place, what in self.blank.items() if place >= skipped}
        return Counters(
            self.gpu,
            self.times_ms[skipped:],
            self.activity[skipped:],
            self.mhz[skipped:],
            blank,
            self.has_clock,
        )


def scrape_times(host: Host, start_s: int, end_s: int, random: Random) -> Iterator[int]:
    """Yield when a host is scraped within some time, as Unix times in milliseconds."""
    first = start_s * 1000 // _SCRAPE_MS - 1
    for number in range(first, end_s * 1000 // _SCRAPE_MS + 1):
        late_ms = random.randrange(2000) if host.late else 0
        time_ms = number * _SCRAPE_MS + host.offset_ms + late_ms
        if start_s * 1000 <= time_ms < end_s * 1000:
            yield time_ms


def fall_ms(job: Job) -> int | None:
    """Return when OFU falls within the job, as Unix time in milliseconds."""
    return None if job.fall is None else round(1000 * (job.start_s + job.fall.at * (job.end_s - job.start_s)))


def job_counters(job: Job, random: Random) -> list[Counters]:
    """Return the readings of all devices of a job, which all work at the same pace."""
    gap = range(0)
    if job.gap:
        first = random.randint(job.start_s + 600, job.end_s - 1800) * 1000
        gap = range(first, first + random.randint(300, 900) * 1000)
    pace = _pace(job, random)
    # A scrape reads all GPUs of a node.
    hosts = dict.fromkeys(host for host, _ in job.places)
    times = {host: list(scrape_times(host, job.start_s, job.end_s, random)) for host in hosts}
    found: list[Counters] = []
    for gpu in _gpus(job):
        counters = Counters(gpu, has_clock=gpu.index != job.without_clock)
        for time_ms in times[gpu.host]:
            if time_ms not in gap:
                _read(counters, time_ms, pace[time_ms // _SCRAPE_MS] * job.ofu, job, random)
        # Slices of one GPU have its clock.
        counters.mhz = next((one for one in found if one.gpu.whole == gpu.whole), counters).mhz
        found.append(counters)
    return found


def _gpus(job: Job) -> Iterator[GPU]:
    if not job.slices:
        for host, index in job.places:
            yield GPU(host, index)
        return
    host = job.places[0][0]
    # Two slices of one GPU, and one of another.
    yield GPU(host, 0, "3g.40gb", "1")
    yield GPU(host, 0, "3g.40gb", "2")
    yield GPU(host, 1, "7g.80gb", "0")


def _pace(job: Job, random: Random) -> dict[int, float]:
    """Return the pace of the job by number of the scrape: 1 on average before a fall.

    With noise of 2 % and a drift of 2 % over some quarters of an hour; nothing in the first minutes, next to
    nothing in two to eight scrapes of each hour (checkpoints, evaluations), and less after a fall.
    """
    first, last = job.start_s // SCRAPE_S - 1, job.end_s // SCRAPE_S + 2
    falls_ms = fall_ms(job)
    falls = last if falls_ms is None else falls_ms // _SCRAPE_MS + 1
    pace, drift = {}, 0.0
    for number in range(first, last):
        drift = 0.97 * drift + random.gauss(0, 0.005)
        pace[number] = random.gauss(1 + drift, 0.02)
    for number in range(first, first + random.randint(2, 6)):
        pace[number] = 0.0
    for hour in range(first + 60, last - 50, 3600 // SCRAPE_S):
        stall, lasts = hour + random.randrange(40), random.randint(2, 8)
        # Not beside a fall, so that the time of the fall is what it is planned to be.
        for number in range(stall, stall + lasts if abs(stall - falls) > 20 else stall):
            pace[number] *= 0.02
    usual = fmean(pace.values())
    left = 1.0 if job.fall is None else job.fall.to
    return {number: share / usual * (left if number >= falls else 1) for number, share in pace.items()}


def _read(counters: Counters, time_ms: int, work: float, job: Job, random: Random) -> None:
    """Take one reading of a device that does some work, given as OFU.

    The faster the clock, the fewer of its cycles are tensor cycles and the more work is done: half of either.
    A slow GPU does the work of the others, as they wait for it, in more of its cycles.
    """
    odd = job.odd if job.odd is not None and job.odd.index == counters.gpu.index else None
    slow = odd is not None and odd.kind == "slow clock"
    usual = SLOW_MHZ if slow else USUAL_MHZ
    mhz = round(random.gauss(usual, MHZ_SD))
    if not slow:
        mhz = min(max(mhz, LEAST_MHZ), MOST_MHZ)
    share = 0.3 if odd is not None and not slow else 1.0
    activity = share * work * random.gauss(1, 0.01) * TENSOR_MHZ / (mhz * usual) ** 0.5
    if job.blanks and random.random() < 0.01:
        both = counters.gpu.host.metric_names == "both"
        counters.blank[len(counters.times_ms)] = random.choice(
            ("activity", "clock", "new name") if both else ("activity", "clock")
        )
    counters.times_ms.append(time_ms)
    counters.activity.append(min(max(round(activity, 6), 0.0), 1.0))
    counters.mhz.append(mhz)
