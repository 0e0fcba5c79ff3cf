"""Traces of real gloo runs with one planted delay each: what was planted is named first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from warm_start import WarmStart

from perf_metrics import TraceBreakdown, largest_loss, losses_of, read_breakdown

pytestmark = pytest.mark.xdist_group("planted delays")

WORKER = Path(__file__).parents[1] / "workers" / "planted_delays.py"
WAYS = ("ddp", "fsdp2", "pipeline")
TWO = [*(f"{way}-{delay}" for way in WAYS for delay in ("rank", "loader", "save")), "ddp-link", "fsdp2-link"]
FOUR = [f"{way}-rank" for way in WAYS]
# Each kind of delay, and those that others wait for under both ways to divide a step.
USUAL = ["ddp-rank", "pipeline-rank", "ddp-loader", "pipeline-loader", "pipeline-save", "ddp-link"]


def ways(delay: str, *among: str) -> pytest.MarkDecorator:
    """A case for each way; those that are not usual are left to the full run."""
    marks = {way: () if f"{way}-{delay}" in USUAL else (pytest.mark.full,) for way in among}
    return pytest.mark.parametrize("way", [pytest.param(way, marks=marks[way]) for way in among])


def launch(size: int, folder: Path, scenarios: list[str]) -> Path:
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    modules = ["torch.distributed.fsdp", "torch.distributed.pipelining", "torch.profiler", "torch._dynamo"]
    warm = WarmStart(modules, environ)
    try:
        processes = [
            warm.start(
                [str(WORKER), str(rank), str(size), str(folder), *scenarios],
                environ,
                folder / f"out-{rank}",
                folder / f"err-{rank}",
            )
            for rank in range(size)
        ]
        codes = [process.wait(120) for process in processes]
    finally:
        warm.close()
    assert codes == [0] * size, "\n".join((folder / f"err-{rank}").read_text() for rank in range(size))
    return folder


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    full = any(
        each.path == request.path and each.get_closest_marker("full") for each in request.session.items
    )
    return launch(2, tmp_path_factory.mktemp("two"), TWO if full else USUAL)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(4, tmp_path_factory.mktemp("four"), FOUR)


def read(folder: Path, scenario: str) -> TraceBreakdown:
    breakdown = read_breakdown(sorted(folder.glob(f"{scenario}-rank*.json.gz")))
    for one in breakdown.ranks:
        assert [step.number for step in one.steps] == [1, 2, 3]
        for step in one.steps:
            assert sum(step.nanoseconds.values()) == step.end_ns - step.start_ns
            assert sum(step.shares.values()) == pytest.approx(1, abs=1e-12)
        # What is exposed has a name, down to the nanosecond.
        exposed = sum(each.exposed_ns for each in one.communications)
        assert exposed == one.nanoseconds["exposed_communication"]
        assert 0 <= sum(one.waiting_ns.values()) <= exposed
        assert one.nanoseconds["matmul"] > 0
    return breakdown


@ways("rank", *WAYS)
def test_a_slow_rank_of_two(two: Path, way: str) -> None:
    breakdown = read(two, f"{way}-rank")
    first = losses_of(breakdown)[0]
    assert (first.kind, first.subject) == ("waiting", "rank 1")
    assert breakdown.straggler is not None
    assert breakdown.straggler.category == "host_gap"
    assert largest_loss(breakdown).startswith(f"Largest loss: {first.share:.1%} of a step is spent waiting")


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_a_slow_rank_of_four(four: Path, way: str) -> None:
    # FSDP2 runs as replicas of shards: its gloo collectives do not tell their group, and ranks 0 and 1 wait
    # for a rank that waits itself.
    first = losses_of(read(four, f"{way}-rank"))[0]
    assert (first.kind, first.subject) == ("waiting", "rank 2")


@ways("loader", "ddp", "fsdp2")
def test_a_slow_loader(two: Path, way: str) -> None:
    first = losses_of(read(two, f"{way}-loader"))[0]
    assert first.kind == "data_wait"
    assert "loader" in first.sentence


def test_a_slow_loader_of_the_first_stage(two: Path) -> None:
    breakdown = read(two, "pipeline-loader")
    first = losses_of(breakdown)[0]
    assert (first.kind, first.subject) == ("waiting", "rank 0")
    assert breakdown.straggler is not None
    assert breakdown.straggler.category == "data_wait"


@ways("save", *WAYS)
def test_a_blocking_save(two: Path, way: str) -> None:
    # Rank 0 writes and the other waits in a barrier of the save: both are in it.
    breakdown = read(two, f"{way}-save")
    assert losses_of(breakdown)[0].kind == "checkpoint"
    assert breakdown.ranks[1].shares["checkpoint"] > 0.3


@ways("link", "ddp", "fsdp2")
def test_a_slow_link(two: Path, tmp_path: Path, way: str) -> None:
    first = losses_of(read(two, f"{way}-link"))[0]
    if first.kind == "host_gap":
        # The machine had other things to do, which is a delay that nobody planted.
        first = losses_of(read(launch(2, tmp_path, [f"{way}-link"]), f"{way}-link"))[0]
    collective = {"ddp": "all_reduce", "fsdp2": "all_gather"}[way]
    assert (first.kind, first.subject) == ("transfer", collective)
