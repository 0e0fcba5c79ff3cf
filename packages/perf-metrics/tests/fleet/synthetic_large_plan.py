"""A fleet of large jobs for some hours: which hosts each has, what it is requeued as, and what is renamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random
from typing import Literal, TypeAlias

from .planted import OddKind

Style: TypeAlias = Literal["slurm", "jobsets"]

START_S = int(datetime(2026, 1, 5, tzinfo=UTC).timestamp())
SCRAPE_S = 30
GPUS = 8
"""Of a host."""
_WIDEST, _WIDTHS = 250, (64, 32, 16, 8)
"""Hosts of a job. Two jobs of each width run beside one another, so that they can change places."""
_REQUEUED_AFTER = 20
"""Scrapes between the end of a job and its start elsewhere: ten minutes, in which its GPUs have no job."""
_USERS = ("ana", "bo", "chen", "dora", "emil", "fatou")
_ACCOUNTS = ("pretraining", "posttraining", "vision")


@dataclass(frozen=True)
class LargeSize:
    """How large the fleet is.

    Attributes:
        gpus: Number of GPUs, 8 on a host.
        days: Time, of which a quarter is the shortest that all falls can be seen in.
        jobsets: Share of the GPUs that Kubernetes has; Slurm has the others.
    """

    gpus: int
    days: float = 1.0
    jobsets: float = 0.5

    def __post_init__(self) -> None:
        least = min(self.hosts(style) for style in ("slurm", "jobsets") if self.hosts(style))
        if self.gpus % GPUS or not 0 <= self.jobsets <= 1 or least < 2 * min(_WIDTHS) or self.days < 0.25:
            raise ValueError(
                f"{self}: take a multiple of {GPUS} GPUs, a share of 0 to 1, 16 hosts of each style or none, "
                "and a quarter of a day or more"
            )

    def hosts(self, style: Style) -> int:
        """Return the number of hosts of one style."""
        of_jobsets = round(self.gpus // GPUS * self.jobsets)
        return of_jobsets if style == "jobsets" else self.gpus // GPUS - of_jobsets

    @property
    def scrapes(self) -> int:
        """Number of scrapes of each GPU."""
        return round(self.days * 24 * 3600 / SCRAPE_S)


@dataclass(frozen=True)
class Allocation:
    """The hosts that a job has from one scrape to another, the last not included."""

    first: int
    last: int
    hosts: tuple[int, ...]


@dataclass(frozen=True)
class LargeJob:
    """One job.

    Attributes:
        name: As the report is to name it: the id, or namespace/JobSet.
        style: How it is labelled.
        user: Who runs it, or its namespace.
        account: Of the user, or the queue.
        workload: Name of its script, the same when it is queued again.
        allocations: Its hosts, one after another.
        ofu: Its level as a share.
        falls_at: Scrape at which it falls to 70 % of that; None for one that does not.
        renamed_at: Scrape from which on hosts, exporters and pods of it are called otherwise.
        odd: Host, number and kind of GPUs that are unlike the others.
        is_slower: Whether it is planted to be slower than the earlier jobs of its run.
    """

    name: str
    style: Style
    user: str
    account: str
    workload: str
    allocations: tuple[Allocation, ...]
    ofu: float
    falls_at: int | None = None
    renamed_at: int | None = None
    odd: tuple[tuple[int, int, OddKind], ...] = ()
    is_slower: bool = False

    @property
    def gpus(self) -> int:
        """Number of its GPUs at any time."""
        return GPUS * len(self.allocations[0].hosts)


def plan_jobs(size: LargeSize, seed: int) -> list[LargeJob]:
    """Return the jobs; hosts of Slurm have the first numbers."""
    random, jobs, low = Random(seed), list[LargeJob](), 0
    for style in ("slurm", "jobsets"):
        hosts = list(range(low, low + size.hosts(style)))
        low += len(hosts)
        drafts = list(_drafts(hosts, size.scrapes, random))
        jobs += [_named(draft, style, len(jobs) + place) for place, draft in enumerate(drafts)]
    return jobs


def _drafts(hosts: list[int], scrapes: int, random: Random) -> Iterator[LargeJob]:
    """Yield jobs without names on as many of the hosts as widths of jobs fill; the others idle."""
    free = hosts
    if len(free) >= 2 * _WIDEST:
        yield from _wide_job(tuple(free[:_WIDEST]), scrapes, random)
        free = free[_WIDEST:]
    number = 0
    while len(free) >= 2 * _WIDTHS[-1]:
        width = next(width for width in (*_WIDTHS[number % 4 :], *_WIDTHS[::-1]) if 2 * width <= len(free))
        yield from _two_lanes(tuple(free[:width]), tuple(free[width : 2 * width]), scrapes, random, number)
        free, number = free[2 * width :], number + 1


def _wide_job(hosts: tuple[int, ...], scrapes: int, random: Random) -> Iterator[LargeJob]:
    """One that is there for all of the time, but for a requeue on the same hosts."""
    middle = scrapes // 2
    places = (
        Allocation(0, middle, hosts),
        Allocation(middle + _REQUEUED_AFTER, scrapes - 5, hosts),
    )
    odd: tuple[tuple[int, int, OddKind], ...] = ((hosts[99], 3, "slow clock"), (hosts[7], 0, "less work"))
    yield _draft(random, "wide", *places, renamed_at=scrapes // 4, odd=odd)


def _two_lanes(
    one: tuple[int, ...], other: tuple[int, ...], scrapes: int, random: Random, number: int
) -> Iterator[LargeJob]:
    """Yield six jobs on two sets of hosts, and what is requeued of them."""

    def at(share: float) -> int:
        return round(share * scrapes)

    def draft(workload: str, *places: Allocation, **planted: object) -> LargeJob:
        return _draft(random, f"{workload}-{number}", *places, **planted)

    again = at(0.32) + _REQUEUED_AFTER
    odd: OddKind = ("slow clock", "less work")[number % 2]  # type: ignore[assignment]
    # Stops, and continues under its id on the other hosts, one of its first GPUs being odd.
    yield draft(
        "moves",
        Allocation(at(0.01), at(0.32), one),
        Allocation(again, at(0.48), other),
        odd=((one[1], 5, odd),),
    )
    # Stops, and continues under a new id on the other hosts.
    first = draft("again", Allocation(0, at(0.31), other))
    yield first
    yield replace(first, allocations=(Allocation(again, at(0.48), one),))
    yield draft("renamed", Allocation(at(0.5), at(0.74), one), renamed_at=at(0.63))
    stops = at(0.6)
    yield draft(
        "in-place",
        Allocation(at(0.5), stops, other),
        Allocation(stops + _REQUEUED_AFTER, at(0.74), other),
    )
    yield draft("falls", Allocation(at(0.75), at(0.99), one), falls_at=at(0.87))
    # The third of its run, and slower than the two before.
    yield replace(
        first, allocations=(Allocation(at(0.75), scrapes, other),), ofu=0.8 * first.ofu, is_slower=True
    )


def _draft(random: Random, workload: str, *places: Allocation, **planted: object) -> LargeJob:
    user = random.choice(_USERS)
    account = _ACCOUNTS[_USERS.index(user) % len(_ACCOUNTS)]
    ofu = random.uniform(0.25, 0.45)
    return replace(LargeJob("", "slurm", user, account, workload, places, ofu), **planted)  # type: ignore[arg-type]


def _named(draft: LargeJob, style: Style, number: int) -> LargeJob:
    if style == "slurm":
        return replace(draft, name=str(7_000_000 + number))
    # A JobSet has no run beside itself: nothing tells that a new one continues another.
    namespace = f"team-{draft.user}"
    return replace(
        draft,
        name=f"{namespace}/{draft.workload}-{number}",
        style=style,
        user=namespace,
        account=f"queue-{draft.account}",
        is_slower=False,
    )
