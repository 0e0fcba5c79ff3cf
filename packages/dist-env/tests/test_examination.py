"""What `examine` finds in ranks with a planted fault, and how it tells whose fault it is."""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from dist_env import DistributedEnvironment, DistributedEnvironmentError, LinkResult, RankReport, examine
from dist_env.device_check import checksums, find_slow_devices, find_wrong_devices, measure_matmul
from dist_env.point_to_point import find_slow_links, find_wrong_links, plan_rounds

HOST = socket.gethostname()
REPORT = RankReport(
    rank=0,
    local_rank=0,
    host="node0",
    device="cuda:0 H100",
    backend="nccl",
    python="3.12.1",
    torch="2.13.0",
    collective_library="2.27.5",
    interface="eth0 (10.0.0.1)",
    loopback=False,
    device_name="H100",
    matmul_flops=600e12,
    checksum="aaaa",
    repeatable=True,
)


def reports(count: int, *, per_host: int = 1, **changes: object) -> list[RankReport]:
    """Ranks on hosts; the last one has the changes."""
    found = [dataclasses.replace(REPORT, rank=rank, host=f"node{rank // per_host}") for rank in range(count)]
    found[-1] = dataclasses.replace(found[-1], **changes)
    return found


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("wrong", "problems", f"rank 1 on {HOST} (cpu) computes wrong numbers: checksum "),
        ("unsteady", "problems", f"rank 1 on {HOST} (cpu) computes wrong numbers: the same computation gave"),
        ("slow", "warnings", f"rank 1 on {HOST} (cpu) is slow: its matrix product runs at "),
        (
            "delay",
            "warnings",
            f"rank 1 on {HOST} (cpu) is slow on all its 2 links: at most 0.000 GB/s, where",
        ),
        ("corrupt", "problems", f"rank 1 on {HOST} (cpu) sends or receives wrong data"),
    ],
)
def test_a_faulty_rank_is_named(launch: Callable[..., Any], fault: str, kind: str, text: str) -> None:
    job = launch("examined.py", 3, fault)
    assert job.codes == [0] * 3, job.err
    found = [note["diagnosis"] for note in job.notes]
    lines = found[0][kind]
    assert any(line.startswith(text) for line in lines), found[0]["warnings"] + found[0]["problems"]
    assert [{**each, "seconds": 0} for each in found] == [{**found[0], "seconds": 0}] * 3
    assert [link["ranks"] for link in found[0]["links"]] == [[0, 1], [0, 2], [1, 2]]
    assert job.notes[0]["phases"] == ["all_reduce", "barrier", "compute", "describe", "links"]
    if kind == "problems":
        assert all("rank 1" in line or "between" in line for line in found[0]["problems"])
    if fault == "corrupt":
        assert [link["wrong_ranks"] for link in found[0]["links"]] == [[0], [], [2]]


def test_alone_without_a_group() -> None:
    with DistributedEnvironment(no_accelerator=True, always=False) as env:
        diagnosis = examine(env)
    assert (diagnosis.all_reduce, diagnosis.links, diagnosis.problems) == ([], [], [])
    (report,) = diagnosis.ranks
    assert report.repeatable is True
    assert report.matmul_flops is not None
    assert report.device_name
    with pytest.raises(DistributedEnvironmentError, match="max_bytes=0 must be positive"):
        examine(env, max_bytes=0)


def test_the_checksum_tells_every_bit_and_leaves_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    first, second = checksums(torch.device("cpu"))
    assert first == second
    assert measure_matmul(torch.device("cpu")) > 1e8
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checksum": "bbbb"}, "checksum bbbb, where 3 of 4 ranks with H100 and torch 2.13.0 have aaaa"),
        ({"repeatable": False}, "the same computation gave other bits the second time"),
        ({"checksum": "bbbb", "device_name": "A100"}, None),
        ({"checksum": "bbbb", "torch": "2.12.0"}, None),
        ({"checksum": "bbbb", "threads": 8}, None),
    ],
)
def test_wrong_device(changes: dict[str, object], message: str | None) -> None:
    lines = find_wrong_devices(reports(4, **changes))
    assert [line.startswith("rank 3 on node3 (cuda:0 H100)") for line in lines] == [True] * bool(message)
    assert all(message in line for line in lines if message)


def test_two_ranks_that_differ_have_no_majority() -> None:
    (line,) = find_wrong_devices(reports(2, checksum="bbbb"))
    assert line.startswith("all ranks compute different numbers")
    assert "aaaa on rank 0 (node0, cuda:0 H100), bbbb on rank 1" in line


@pytest.mark.parametrize(("part", "named"), [(0.80, True), (0.90, False)])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_slow_accelerator_is_a_problem(part: float, named: bool, count: int) -> None:
    warnings, problems = find_slow_devices(reports(count, matmul_flops=part * 600e12))
    assert warnings == []
    assert len(problems) == named
    assert all("80% of the 600000.0 GFLOP/s" in line for line in problems)


def test_a_cpu_may_be_slower_and_is_only_warned_of() -> None:
    for part, expected in ((0.3, 1), (0.6, 0)):
        kind = [dataclasses.replace(r, device="cpu") for r in reports(4, matmul_flops=part * 600e12)]
        warnings, problems = find_slow_devices(kind)
        assert (len(warnings), problems) == (expected, [])


@pytest.mark.parametrize("sizes", [[1], [2], [3], [8], [8, 8], [3, 5, 4], [20, 20], [1] * 9, [8] * 32])
def test_rounds_of_pairs(sizes: list[int]) -> None:
    hosts = [f"n{host}" for host, size in enumerate(sizes) for _ in range(size)]
    rounds = plan_rounds(hosts)
    pairs = [pair for each in rounds for pair in each]
    assert len(set(pairs)) == len(pairs)
    assert all(a < b for a, b in pairs)
    for each in rounds:
        assert max(Counter(rank for pair in each for rank in pair).values()) == 1
    within = {(a, b) for a, b in combinations(range(len(hosts)), 2) if hosts[a] == hosts[b]}
    if max(sizes) <= 16:
        assert within <= set(pairs)
    partners = Counter(rank for pair in pairs for rank in pair)
    if len(hosts) > 1:
        assert min(partners[rank] for rank in range(len(hosts))) >= (2 if len(hosts) > 2 else 1)
    assert len(rounds) <= 16 + 2 * len(hosts).bit_length()


def results(of: list[RankReport], bad: dict[tuple[int, int], float], wrong: set[int]) -> list[LinkResult]:
    """25 GB/s but for `bad`; ranks of `wrong` receive and send wrong data."""
    pairs = sorted(pair for each in plan_rounds([r.host for r in of]) for pair in each)
    return [
        LinkResult(
            ranks=pair,
            hosts=(of[pair[0]].host, of[pair[1]].host),
            bytes=1 << 20,
            seconds=(1 << 20) / (25e9 * bad.get(pair, 1.0)),
            bandwidth=25e9 * bad.get(pair, 1.0),
            wrong_ranks=pair if wrong & set(pair) else (),
        )
        for pair in pairs
    ]


@pytest.mark.parametrize(("count", "per_host"), [(3, 3), (4, 1), (8, 8), (16, 8), (64, 8)])
def test_a_slow_rank_is_named_and_a_slow_link_as_a_pair(count: int, per_host: int) -> None:
    of = reports(count, per_host=per_host)
    pairs = [r.ranks for r in results(of, {}, set())]
    assert find_slow_links(results(of, {}, set()), of) == []
    slow = count - 2
    own = {pair: 0.1 for pair in pairs if slow in pair}
    (line,) = find_slow_links(results(of, own, set()), of)
    assert line.startswith(
        f"rank {slow} on node{slow // per_host} (cuda:0 H100) is slow on all its {len(own)}"
    )
    (line,) = find_slow_links(results(of, {(0, 1): 0.1}, set()), of)
    assert line.startswith("the link between rank 0 on node0 (cuda:0 H100) and rank 1 on node")
    assert "2.500 GB/s, where others of the kind have 25.000 GB/s" in line


def test_wrong_data_name_the_rank() -> None:
    of = reports(8)
    (line,) = find_wrong_links(results(of, {}, {5}), of)
    assert line.startswith("rank 5 on node5 (cuda:0 H100) sends or receives wrong data")
