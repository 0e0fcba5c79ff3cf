"""Ranks find one another in a store, here as threads over a store in this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from dist_env import DistributedEnvironmentError, RankFailedError, RankTimeoutError
from dist_env.coordination import RankRecord
from dist_env.handshake import check_agreement, join


def record(rank: int, world_size: int = 3, **changes: Any) -> RankRecord:
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank}",
        "pid": 100 + rank,
        "token": f"token-{rank}",
        "world_size": world_size,
        "device": "cpu",
        "device_identity": None,
        "backend": "gloo",
    }
    return RankRecord(**values | changes)


def meet(store: Any, records: list[RankRecord], timeout: float = 5.0) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(records)) as pool:
        return [pool.submit(join, store, each, timeout) for each in records]


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def test_all_meet_and_know_their_hosts(store: Any) -> None:
    coordinators = [f.result() for f in meet(store, [record(2), record(0), record(1)])]
    assert [c.host_of(1) for c in coordinators] == ["node1"] * 3
    assert [c.host_of(7) for c in coordinators] == ["unknown host"] * 3


def test_a_second_meeting_in_the_same_store_is_separate(store: Any) -> None:
    """As after a restart by torchrun: the first meeting ended in a failure, and other processes come."""
    first = [f.result() for f in meet(store, [record(0), record(1), record(2)])]
    first[1].fail(ValueError("first try"))
    second = [f.result() for f in meet(store, [record(1, 2, token="b", host="x"), record(0, 2, token="a")])]
    second[0].raise_if_failed()
    assert second[1].host_of(1) == "x"
    with pytest.raises(RankFailedError, match="rank 1 on node1 failed: ValueError: first try"):
        first[0].raise_if_failed()


def test_an_answer_of_a_dead_process_does_not_count(store: Any) -> None:
    [dead, _] = meet(store, [record(1, 2, token="dead"), record(2, 9, token="dead too")], timeout=0.1)
    assert isinstance(dead.exception(), RankTimeoutError)
    [alone] = meet(store, [record(0, 2)], timeout=0.3)
    assert alone.exception().missing == {1: "unknown host"}  # type: ignore[union-attr]


def test_missing_ranks_are_named_on_every_rank(store: Any) -> None:
    zero, two = meet(store, [record(0, 4), record(2, 4)], timeout=0.5)
    assert str(zero.exception()) == (
        "joining the job: init_timeout=0.5 s passed on rank 0 on node0; 2 of 4 ranks did not arrive: "
        "rank 1, rank 3."
    )
    assert isinstance(two.exception(), RankFailedError)
    assert "rank 1, rank 3" in str(two.exception())


def test_of_thousands_of_missing_ranks_some_are_named(store: Any) -> None:
    [alone] = meet(store, [record(0, 2048)], timeout=0.3)
    error = alone.exception()
    assert "2047 of 2048 ranks did not arrive: rank 1, rank 2, " in str(error)
    assert str(error).endswith(", rank 16 and 2,031 more.")
    assert isinstance(error, RankTimeoutError)
    assert len(error.missing) == 2047


def test_one_rank_twice(store: Any) -> None:
    twins = [record(1, token="x"), record(1, token="y", pid=7, host="other")]
    zero, *others = meet(store, [record(0), *twins])
    assert isinstance(zero.exception(), DistributedEnvironmentError)
    assert str(zero.exception()).startswith("RANK=1 is claimed twice, by process ")
    assert all("RANK=1 is claimed twice" in str(f.exception()) for f in others)


def test_rank_0_twice(store: Any) -> None:
    one, other = meet(store, [record(0, token="x"), record(0, token="y")], timeout=1.0)
    messages = sorted(str(f.exception()) for f in (one, other))
    assert messages[0].startswith("RANK=0 is claimed twice")


def test_world_sizes_differ(store: Any) -> None:
    zero, one = meet(store, [record(0, 2), record(1, 4)])
    assert str(zero.exception()).startswith(
        "WORLD_SIZE=4 of rank 1 on node1 contradicts WORLD_SIZE=2 of rank 0 on node0"
    )
    assert "WORLD_SIZE=4 of rank 1" in str(one.exception())


def test_two_ranks_on_one_device() -> None:
    gpu = {"device": "cuda:0", "device_identity": "GPU-1", "backend": "nccl"}
    check_agreement({0: record(0, **gpu), 1: record(1, **gpu | {"device_identity": "GPU-2"})})
    check_agreement({0: record(0, **gpu | {"backend": "gloo"}), 1: record(1, **gpu | {"backend": "gloo"})})
    with pytest.raises(DistributedEnvironmentError, match="ranks 0 and 1 on node1 both use cuda:0"):
        check_agreement({0: record(0, **gpu), 1: record(1, **gpu)})
