"""Transfers between pairs of ranks: how fast each is, whether what arrives is right, and who is to blame.

A collective is as slow as its slowest link and says nothing about which one that is. Here all ranks exchange
with one partner at a time, so that a time belongs to one pair.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_env.collectives import gather_objects
from dist_env.device import synchronize
from dist_env.interface import DistributedEnvInterface
from dist_env.rank_report import RankReport, name_device
from dist_env.tables import name_ranks

_MEBI = 1024**2
_CPU_BYTES, _ACCELERATOR_BYTES = _MEBI, 32 * _MEBI
_REPEATS = 4
# Every pair of a host is tried up to this many ranks; beyond it, pairs at distances 1, 2, 4, ...
_LARGEST_HOST = 16
# Of the reference, see `_reference`. The times of CPUs vary by a factor of two and more from one moment to
# the next where ranks and other programs share their cores.
ACCELERATOR_FRACTION, CPU_FRACTION = 0.5, 0.2
# Float32 holds these numbers exactly.
_PERIOD = 8191


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """One pair of ranks, which sent to each other at the same time.

    Attributes:
        ranks: The two global ranks, the smaller first.
        hosts: Their hosts.
        bytes: Size of the tensor that each sent.
        seconds: Median time of an exchange, on the rank of the two that waited less.
        bandwidth: `bytes / seconds`, in bytes per second, in each of the two directions.
        wrong_ranks: Those of the two to which something else came than was sent.
    """

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    bytes: int
    seconds: float
    bandwidth: float
    wrong_ranks: tuple[int, ...]


def plan_rounds(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Which pairs exchange at the same time.

    First each pair of every host, then pairs of different hosts at distances 1, 2, 4, ...: so each rank has a
    number of partners that grows with the logarithm of the number of ranks.

    Args:
        hosts: Host of each rank.

    Returns:
        Rounds of pairs, the smaller rank first; no rank is twice in a round, and no pair in two rounds.
    """
    members: defaultdict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    rounds: list[list[tuple[int, int]]] = []
    for ranks in members.values():
        small = len(ranks) <= _LARGEST_HOST
        found = _all_pairs(ranks) if small else _pairs_at_distances(ranks)
        for index, pairs in enumerate(found):
            if index == len(rounds):
                rounds.append([])
            rounds[index] += pairs
    for pairs in _pairs_at_distances(range(len(hosts))):
        rounds.append([(a, b) for a, b in pairs if hosts[a] != hosts[b]])
    return [pairs for pairs in rounds if pairs]


def _all_pairs(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Every pair, by the circle method of tournaments: one stays, and the others turn around it."""
    seats: list[int | None] = [*ranks, None] if len(ranks) % 2 else [*ranks]
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _pairs_at_distances(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pairs at distances 1, 2, 4, ...; two rounds for each, because a rank has a partner on either side."""
    distance = 1
    while distance < len(ranks):
        for parity in (0, 1):
            yield [
                (ranks[i], ranks[i + distance])
                for i in range(len(ranks) - distance)
                if i // distance % 2 == parity
            ]
        distance *= 2


def measure_pairs(
    env: DistributedEnvInterface,
    hosts: Sequence[str],
    on_round: Callable[[], None],
    largest: float | None = None,
) -> list[LinkResult]:
    """Exchange with each partner of `plan_rounds`. Call it on every rank, with a process group.

    Args:
        env: The open environment.
        hosts: Host of each rank.
        on_round: Called before each round.
        largest: Bytes that a tensor may have; None for 1 MiB on CPUs and 32 MiB on accelerators.

    Returns:
        The same results on every rank, sorted by ranks.
    """
    device = _device_of_transfers(env)
    size = _CPU_BYTES if device.type == "cpu" else _ACCELERATOR_BYTES
    length = size // 4 if largest is None else max(1, min(size, int(largest)) // 4)
    told: list[tuple[int, float, bool]] = []
    for pairs in plan_rounds(hosts):
        on_round()
        for a, b in pairs:
            if env.rank in (a, b):
                partner = b if env.rank == a else a
                told.append((partner, *_exchange(env.rank, partner, length, device)))
    sides = {
        (rank, partner): (seconds, right)
        for rank, of_rank in enumerate(gather_objects(told, env))
        for partner, seconds, right in of_rank
    }
    results = []
    for a, b in sorted(pair for pairs in plan_rounds(hosts) for pair in pairs):
        seconds = min(sides[a, b][0], sides[b, a][0])
        results.append(
            LinkResult(
                ranks=(a, b),
                hosts=(hosts[a], hosts[b]),
                bytes=length * 4,
                seconds=seconds,
                bandwidth=length * 4 / seconds,
                wrong_ranks=tuple(rank for rank, other in ((a, b), (b, a)) if not sides[rank, other][1]),
            )
        )
    return results


def _exchange(rank: int, partner: int, length: int, device: torch.device) -> tuple[float, bool]:
    """Median time in seconds, and whether each time came what the partner sends."""
    pattern = torch.arange(length, device=device, dtype=torch.float32).remainder_(_PERIOD)
    received = torch.empty_like(pattern)
    times, right = [], True
    # The first one opens connections, and is not timed.
    for repeat in range(_REPEATS + 1):
        sent = pattern + (rank + repeat)
        received.fill_(-1.0)
        synchronize(device)
        start = time.perf_counter()
        # Both at once: a rank that sends first would wait for a partner that does the same.
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        )
        for work in works:
            work.wait()
        synchronize(device)
        times.append(time.perf_counter() - start)
        right = right and torch.equal(received, pattern + (partner + repeat))
    return statistics.median(times[1:]), right


def _device_of_transfers(env: DistributedEnvInterface) -> torch.device:
    """The rank's device, or the CPU where gloo serves it, which sends no device tensors."""
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return torch.device("cpu") if backends.get(env.device_type) == "gloo" else env.device


def find_wrong_links(results: Sequence[LinkResult], reports: Sequence[RankReport]) -> list[str]:
    """Problems: what came is not what was sent. A rank of which all transfers are wrong is named alone."""
    lines = []
    ranks, pairs = blame(results, [result for result in results if result.wrong_ranks])
    for rank in ranks:
        lines.append(
            f"{name_device(reports[rank])} sends or receives wrong data: all its transfers with "
            f"{name_ranks(_partners(results, rank), len(reports))} were wrong."
        )
    for result in pairs:
        lines.append(
            f"wrong data came to {name_ranks(result.wrong_ranks, len(reports))} between "
            f"{_pair(result, reports)}."
        )
    return lines


def find_slow_links(results: Sequence[LinkResult], reports: Sequence[RankReport]) -> list[str]:
    """Warnings: transfers far slower than others of their kind. A rank of which all are slow is named alone.

    Transfers are of one kind if their devices have the same names and either all or none stay within a host.
    """
    kinds: defaultdict[tuple[object, ...], list[LinkResult]] = defaultdict(list)
    for result in results:
        names = sorted(reports[rank].device_name for rank in result.ranks)
        kinds[(*names, result.hosts[0] == result.hosts[1])].append(result)
    slow: dict[tuple[int, int], float] = {}
    for kind in kinds.values():
        reference = _reference([result.bandwidth for result in kind])
        on_cpu = any(reports[rank].device == "cpu" for rank in kind[0].ranks)
        fraction = CPU_FRACTION if on_cpu else ACCELERATOR_FRACTION
        slow |= {r.ranks: reference for r in kind if r.bandwidth < fraction * reference}
    ranks, pairs = blame(results, [result for result in results if result.ranks in slow])
    lines = []
    for rank in ranks:
        own = [result for result in results if rank in result.ranks]
        best = max(own, key=lambda result: result.bandwidth)
        lines.append(
            f"{name_device(reports[rank])} is slow on all its {len(own)} links: at most "
            f"{best.bandwidth / 1e9:.3f} GB/s, where others of the kind have "
            f"{slow[best.ranks] / 1e9:.3f} GB/s. Look at its device, its network card and what else runs on "
            "its host."
        )
    for result in pairs:
        lines.append(
            f"the link between {_pair(result, reports)} is slow: {result.bandwidth / 1e9:.3f} GB/s, where "
            f"others of the kind have {slow[result.ranks] / 1e9:.3f} GB/s."
        )
    return lines


def blame(results: Sequence[LinkResult], bad: Sequence[LinkResult]) -> tuple[list[int], list[LinkResult]]:
    """The ranks that explain bad pairs, and the bad pairs that none of them explains.

    Args:
        results: All pairs.
        bad: Those with something wrong.

    Returns:
        Ranks with two links or more, of which all are bad; and the bad pairs without such a rank.
    """
    links_of: defaultdict[int, int] = defaultdict(int)
    bad_of: defaultdict[int, int] = defaultdict(int)
    for counts, some in ((links_of, results), (bad_of, bad)):
        for result in some:
            for rank in result.ranks:
                counts[rank] += 1
    ranks = sorted(rank for rank, count in bad_of.items() if count == links_of[rank] >= 2)
    return ranks, [result for result in bad if not set(ranks) & set(result.ranks)]


def _reference(bandwidths: Sequence[float]) -> float:
    """The third quartile: of three ranks, one that is slow takes two of the three links with it."""
    return sorted(bandwidths)[math.ceil(0.75 * len(bandwidths)) - 1]


def _partners(results: Sequence[LinkResult], rank: int) -> list[int]:
    return [other for r in results if rank in r.ranks for other in r.ranks if other != rank]


def _pair(result: LinkResult, reports: Sequence[RankReport]) -> str:
    first, second = (name_device(reports[rank]) for rank in result.ranks)
    return f"{first} and {second}"
