"""Which jobs the synthetic fleet runs, when and where, and what is planted in which of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

from .planted import FALLS, MISTAKES, ODD_GPUS, SLOWER_RUN, STEADY_RUN, Fall, Mistake, OddGPU
from .production_table import TABLE, bucket_sizes, draw_job

START_S = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
SCRAPE_S = 30
_HOUR_S = 3600
_OVERLAP_S = 1200
"""Seconds in which two jobs share a device."""
_BETWEEN_JOBS_S = 900
_LATE_HOST = 5


@dataclass(frozen=True)
class FleetSize:
    """How large the fleet is: jobs of one to four hours each, in so many days."""

    jobs: int
    days: float

    @classmethod
    def scaled(cls, scale: float) -> FleetSize:
        """Return a share of the full size, 600 jobs in 15 days; the fleet is as busy."""
        return cls(round(600 * scale), round(15 * 24 * scale) / 24)


@dataclass(frozen=True)
class Host:
    """A node with 8 GPUs, and what its exporter is like.

    Attributes:
        name: Its name.
        offset_ms: When it is scraped, after each multiple of 30 s.
        host_label: "Hostname" until May 2026, "hostname" after.
        metric_names: "old", "new" or "both" names of tensor activity.
        late: Whether its scrapes come up to 2 s late.
    """

    name: str
    offset_ms: int
    host_label: str
    metric_names: str
    late: bool


@dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        name: Value of the label hpc_job.
        gpus: Number of GPUs of the whole job, of which up to 8 have series.
        start_s: Unix time in seconds.
        end_s: Unix time in seconds.
        ofu: Its level as a share, while it works.
        difference: MFU - OFU as a share; of a job with a mistake the ratio counts instead.
        mistake: What is planted in its MFU.
        run: Name of the workload.
        fall: A fall in its middle.
        odd: A GPU unlike the others.
        slices: Whether it runs on MIG slices, whose GPUs have the clock.
        without_clock: Number of a GPU whose clock is not exported.
        blanks: Whether one sample in a hundred is blank.
        gap: Whether its nodes are not scraped for some minutes.
        after: Name of the job whose first two devices it takes over while that one still runs.
        from_table: Whether MFU and OFU are drawn from the table, with nothing planted.
        places: Pairs of host and number of the GPU.
    """

    name: str
    gpus: int
    start_s: int
    end_s: int
    ofu: float
    difference: float = 0.0
    mistake: Mistake | None = None
    run: str = ""
    fall: Fall | None = None
    odd: OddGPU | None = None
    slices: bool = False
    without_clock: int | None = None
    blanks: bool = False
    gap: bool = False
    after: str | None = None
    from_table: bool = False
    places: tuple[tuple[Host, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """The fleet: what runs from `start_s` to `end_s` in Unix time, and some jobs that are cut by them."""

    start_s: int
    end_s: int
    jobs: tuple[Job, ...]
    idle_host: Host


def plan_fleet(size: FleetSize, seed: int = 0) -> Plan:
    """Return the fleet; the same for the same arguments.

    Raises:
        ValueError: It is too small for all that is to be planted.
    """
    random = Random(seed)
    end_s = START_S + round(size.days * 24 * _HOUR_S)
    jobs = _jobs(size, random, end_s)
    return Plan(START_S, end_s, tuple(_placed(jobs, random)), _host(99))


def _jobs(size: FleetSize, random: Random, end_s: int) -> list[Job]:
    drawn = [_from_table(random, number, end_s) for number in _bucket_numbers(size.jobs, random)]
    jobs = [replace(job, name=str(4_000_000 + place)) for place, job in enumerate(drawn)]
    special = [job for _ in range(max(1, size.jobs // 200)) for job in _special(random)]
    once = [*_runs(end_s), *_cut(end_s), *_untidy()]
    if len(special) + len(once) > 0.8 * size.jobs or end_s - START_S < 24 * _HOUR_S:
        raise ValueError(
            f"{size}: {len(special) + len(once)} jobs have something of their own; take 50 in a day or more"
        )
    for place, own in enumerate([*special, *once]):
        jobs[place] = replace(jobs[place], **own)  # type: ignore[arg-type]
    first, second = (place for place, job in enumerate(jobs) if job.after is not None)
    jobs[first] = replace(jobs[first], after=None)
    jobs[second] = _following(jobs[second], jobs[first])
    return [
        replace(job, blanks=place % 6 == 0 and not job.slices, gap=place % 7 == 0 and job.fall is None)
        for place, job in enumerate(jobs)
    ]


def _bucket_numbers(jobs: int, random: Random) -> list[int]:
    numbers = [number for number, count in enumerate(bucket_sizes(jobs)) for _ in range(count)]
    random.shuffle(numbers)
    return numbers


def _from_table(random: Random, number: int, end_s: int) -> Job:
    lasts = random.randint(_HOUR_S, 4 * _HOUR_S)
    # Nothing is cut by accident, so that the expected figures are those of whole jobs.
    start_s = random.randint(START_S + 120, end_s - lasts - 120)
    ofu, difference = draw_job(TABLE[number], random)
    return Job("", TABLE[number].gpus, start_s, start_s + lasts, ofu, difference, from_table=True)


def _special(random: Random) -> Iterator[dict[str, object]]:
    """Yield what is planted, more than once in a large fleet."""
    for mistake in MISTAKES:
        yield {"mistake": mistake, "ofu": mistake.ofu, "from_table": False}
    agreeing = {"ofu": random.uniform(0.3, 0.4), "difference": -0.01, "from_table": False}
    for fall in FALLS:
        yield {**agreeing, "fall": fall}
    for odd in ODD_GPUS:
        yield {**agreeing, "odd": odd}


def _runs(end_s: int) -> Iterator[dict[str, object]]:
    for run, levels in (("slower-after-restart", SLOWER_RUN), ("steady", STEADY_RUN)):
        for place, ofu in enumerate(levels):
            start_s = START_S + (place + 1) * (end_s - START_S) // (len(levels) + 2)
            times = {"start_s": start_s, "end_s": start_s + 2 * _HOUR_S}
            yield {"run": run, "gpus": 512, "ofu": ofu, "difference": -0.01, "from_table": False, **times}


def _cut(end_s: int) -> Iterator[dict[str, object]]:
    """Yield jobs that run over the start and the end, and one that begins and one that ends just there."""
    for start_s in (START_S - 5000, START_S, end_s - 6000):
        yield {"start_s": start_s, "end_s": start_s + 9000}
    yield {"start_s": end_s - 7200, "end_s": end_s}


def _untidy() -> Iterator[dict[str, object]]:
    yield {"slices": True, "gpus": 8, "from_table": False}
    yield {"without_clock": 6}
    for after in ("nobody", "the one before"):
        yield {"after": after, "gpus": 64, "from_table": False}


def _following(job: Job, before: Job) -> Job:
    start_s = before.end_s - _OVERLAP_S
    # On the level of the job before: what its devices do changes hands, and does not fall.
    return replace(job, start_s=start_s, end_s=start_s + 2 * _HOUR_S, after=before.name, ofu=before.ofu)


def _placed(jobs: Sequence[Job], random: Random) -> list[Job]:
    """Give each job devices that are free, in the order of the starts."""
    hosts = [_host(number) for number in range(12)]
    busy_until = dict.fromkeys(hosts, 0)
    followed = {job.after: job for job in jobs if job.after is not None}
    placed: dict[str, Job] = {}
    for number, job in enumerate(sorted(jobs, key=lambda job: job.start_s)):
        if job.after is not None:
            placed[job.name] = replace(job, places=placed[job.after].places[:2])
            continue
        wanted = _wanted(number, job)
        free = [host for host in hosts if busy_until[host] + _BETWEEN_JOBS_S <= job.start_s]
        for _ in range(len(wanted) - len(free)):
            hosts.append(_host(len(hosts)))
            free.append(hosts[-1])
        last_s = followed[job.name].end_s if job.name in followed else job.end_s
        taken = random.sample(free, len(wanted))
        busy_until.update(dict.fromkeys(taken, last_s))
        places = tuple((host, gpu) for host, gpus in zip(taken, wanted, strict=True) for gpu in range(gpus))
        placed[job.name] = replace(job, places=places)
    return list(placed.values())


def _wanted(number: int, job: Job) -> tuple[int, ...]:
    """Return the number of GPUs with series on each node of a job."""
    if job.odd is not None or job.without_clock is not None or job.slices or job.mistake is not None:
        return (8,)
    return ((8,), (8,), (4, 4), (8,), (4,))[number % 5]


def _host(number: int) -> Host:
    late = number == _LATE_HOST
    return Host(
        name=f"node-{number:02d}",
        # Late ones cross the multiples of 30 s, where a query with that step cuts.
        offset_ms=29_000 if late else (number * 7_919 + 1_234) % 30_000,
        host_label=("Hostname", "hostname")[number % 2],
        metric_names=("old", "both", "new")[number % 3],
        late=late,
    )
