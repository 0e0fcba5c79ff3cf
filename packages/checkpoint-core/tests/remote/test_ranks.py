"""Several real ranks over gloo: each uploads files of its own, and all agree on every failure."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from s3_proxy import Proxy

READER_KEY, READER_SECRET = "AKIAREADER", "secret-of-the-reader"
WORKERS = Path(__file__).parent / "workers"
LAYOUTS = ["copies on 2", "columns on 2", "2 stages of 2 shards"]
MORE = [*LAYOUTS, "whole", "shards on 1", "shards on 3", "2 copies of 2 shards", "2 stages", "4 stages"]
HEADERS = 60_000
"""Bytes of all file headers, which every rank reads; there are more files than on a disk."""
Worked = subprocess.CompletedProcess[str]


@pytest.fixture
def layouts(run_worker: Callable[..., Worked], weed, s3: str, tmp_path: Path) -> Callable[[list[str]], dict]:
    environment = json.dumps(weed.environment())

    def run(names: list[str]) -> dict:
        return json.loads(run_worker(WORKERS / "store_layouts.py", tmp_path, environment, s3, *names).stdout)

    return run


def check(results: dict) -> None:
    for pair, ranks in results["load"].items():
        for rank, seen in enumerate(ranks):
            assert seen["compared"] > 10, pair
            assert (pair, rank, seen["wrong"], seen["missing"]) == (pair, rank, [], [])
            assert seen["own"] <= seen["read"] <= seen["own"] + HEADERS, (pair, rank)
    for name, ranks in results["save"].items():
        files = ranks[0]["files"]
        by_rank = [set(seen["uploaded"]) for seen in ranks]
        # Each file has one writer, and all that lies there was uploaded by a rank or is the manifest.
        assert sum(map(len, by_rank)) == len(set.union(*by_rank)), name
        assert set.union(*by_rank) | {"manifest.json"} == set(files), name
        tensors = [
            sum(size for file, size in seen["uploaded"].items() if file.endswith(".safetensors"))
            for seen in ranks
        ]
        # Of copies of shards, one copy is uploaded.
        if name.startswith("shards") and len(ranks) > 1:
            assert max(tensors) <= 1.5 * sum(tensors) / len(ranks), (name, tensors)


def test_every_layout_from_every_other(layouts: Callable[[list[str]], dict]) -> None:
    check(layouts(LAYOUTS))


@pytest.mark.full
def test_more_layouts(layouts: Callable[[list[str]], dict]) -> None:
    check(layouts(MORE))


@pytest.fixture
def two_ranks(run_worker: Callable[..., Worked], tmp_path: Path) -> Callable[..., list[dict]]:
    def run(**settings: object) -> list[dict]:
        run_worker(WORKERS / "store_ranks.py", tmp_path, json.dumps(settings))
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.fixture
def proxies(weed) -> Iterator[list[Proxy]]:
    found = [Proxy(weed.endpoint) for _ in range(2)]
    yield found
    for proxy in found:
        proxy.close()


def check_failure(seen: list[dict], parts: list[str]) -> None:
    first, second = (each["failing"]["message"] for each in seen)
    assert first == second
    assert all(part in first for part in ["saving checkpoint-2", "rank 1 (", *parts]), first
    for each in seen:
        assert each["first"]["message"] is None
        assert each["untouched"]
        assert each["failing"]["seconds"] < 60


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_may_not_write(two_ranks, weed, proxies, s3: str, asynchronous: bool) -> None:
    bad, counted = weed.environment(READER_KEY, READER_SECRET), [each.address for each in proxies]
    seen = two_ranks(address=s3, good=weed.environment(), bad=bad, counted=counted, asynchronous=asynchronous)
    check_failure(seen, ["the credentials do not permit it"])
    for each in seen:
        assert each["good again"]["message"] is None
        assert (each["loaded"], each["values"], each["whole"]) == (3, [3.0], 3)
        assert each["files"] == [
            "copy.safetensors",
            "manifest.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "more-00001-of-00002.safetensors",
            "more-00002-of-00002.safetensors",
            "more.safetensors.index.json",
            "own.rank0.json",
            "own.rank0.safetensors",
            "own.rank1.json",
            "own.rank1.safetensors",
        ]
    # What the server gave each: its half of the weights, and its half of all bytes to verify them.
    weights = 4 * (1500 * 2000 + 2000 + 2000 * 1501 + 1501)
    for proxy in proxies:
        assert 0.97 * weights < proxy.read(r"model-\d.*\.safetensors$") < 1.03 * weights


def test_a_bucket_that_is_full_for_one_rank(two_ranks, small_weed) -> None:
    """The bucket has room for two volumes of 32 MB."""
    seen = two_ranks(
        address="s3://tests/full/run",
        good=small_weed.environment(),
        bad=None,
        too_much=80_000_000,
        counted=[small_weed.endpoint] * 2,
        asynchronous=False,
    )
    check_failure(seen, ["own.rank1.safetensors", "it may be full", "free space there"])
    for each in seen:
        assert (each["loaded"], each["values"], each["whole"]) == (1, [1.0], 1)


@pytest.mark.full
def test_a_resume_peaks_at_the_shard(
    run_worker: Callable[..., Worked], weed, s3: str, tmp_path: Path
) -> None:
    run_worker(WORKERS / "store_memory.py", tmp_path, json.dumps(weed.environment()), s3)
    for rank in range(2):
        saved, loaded = (
            json.loads((tmp_path / f"{action}{rank}.json").read_text()) for action in ("save", "load")
        )
        print(rank, saved, loaded)
        assert loaded["values"] == [[number] for number in (1.0, 2.0, 3.0, 4.0)]
        assert loaded["shard"] == 200_000_000
        # The memory that the values go into is first touched by the load; the rest is what is in flight.
        assert loaded["used"] < loaded["shard"] + 150_000_000
        assert saved["used"] < 170_000_000
