"""Runs whose checkpoints are in an object store: every layout continues those of every other one.

Each rank has a proxy of its own before a real S3 server, which counts what it reads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from equivalence.case import EXACT, Case
from equivalence.rank import Part
from equivalence.ranks import train_on_ranks
from equivalence.reference import Recipe
from equivalence.table import expected, largest_deviation
from equivalence.training import STOP_AT
from s3_proxy import Proxy
from s3_servers import Server, end, start_weed
from warm_start import WarmStart

from checkpoint_core import find_latest_checkpoint
from dist_env import open_object_store

RECIPE = Recipe(steps=STOP_AT + 5)
LAYOUTS = {
    "single": ("ddp", 1),
    "ddp": ("ddp", 2),
    "fsdp2": ("fsdp2", 2),
    "fsdp2 of 4": ("fsdp2", 4),
    "pipeline": ("pipeline", 2),
}
WAYS = [(first, second) for first in LAYOUTS for second in LAYOUTS]
# Each kind of ranks saves once or loads once.
USUAL = {
    ("single", "fsdp2"),
    ("pipeline", "ddp"),
    ("fsdp2", "single"),
}
RANKS = 4


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server, process = start_weed(tmp_path_factory.mktemp("weed"))
    yield server
    end(process)


@pytest.fixture
def proxies(weed: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Proxy]]:
    """One for each rank, of which this process has the first."""
    found = [Proxy(weed.endpoint) for _ in range(RANKS)]
    for name, value in {**weed.environment(), "AWS_ENDPOINT_URL": found[0].address}.items():
        monkeypatch.setenv(name, value)
    open_object_store.cache_clear()
    yield found
    for proxy in found:
        proxy.close()
    open_object_store.cache_clear()


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*way, marks=() if way in USUAL else pytest.mark.full) for way in WAYS],
    ids=[" to ".join(way) for way in WAYS],
)
def test_a_run_in_a_store_continues(
    proxies: list[Proxy], weed: Server, tmp_path: Path, first: str, second: str
) -> None:
    address = f"s3://tests/{uuid.uuid4().hex[:12]}/run"
    (trainer, size), (next_trainer, next_size) = LAYOUTS[first], LAYOUTS[second]
    case = Case(
        name=f"{first} to {second}",
        recipe=RECIPE,
        accumulation=4,
        trainer=trainer,
        next_trainer=next_trainer,
        world_size=size,
        next_world_size=next_size,
        settings={"output_dir": address, "logging_dir": str(tmp_path / "logs")},
    )

    def environ(rank: int) -> dict[str, str]:
        return {**weed.environment(), "AWS_ENDPOINT_URL": proxies[rank].address}

    train_on_ranks(case, tmp_path, size, Part.FIRST, environ)
    newest = find_latest_checkpoint(address)
    assert newest is not None
    assert str(newest) == f"{address}/checkpoint-{STOP_AT}"
    for proxy in proxies:
        proxy.requests.clear()
    points = train_on_ranks(case, tmp_path, next_size, Part.SECOND, environ)
    off = largest_deviation(points, expected(RECIPE))
    assert max(off.loss, off.grad_norm) <= EXACT
    assert not (tmp_path / "checkpoint-16").exists()
    saved = open_object_store("s3://tests", 60.0).objects(
        f"{address.removeprefix('s3://tests/')}/{newest.name}"
    )
    check_bytes(proxies[:next_size], {each.key: each.size for each in saved})


@pytest.mark.parametrize(
    ("first", "second", "disks"),
    [pytest.param("fsdp2", "pipeline", "ba", marks=pytest.mark.full), ("pipeline", "fsdp2", "ac")],
    ids=["all nodes are back, in another order", "one disk is lost"],
)
def test_a_run_continues_of_which_each_node_keeps_a_part(
    weed: Server, tmp_path: Path, first: str, second: str, disks: str
) -> None:
    address = f"s3://tests/{uuid.uuid4().hex[:12]}/run"
    case = Case(
        name=f"{first} to {second} on disks {disks}",
        recipe=RECIPE,
        accumulation=4,
        trainer=first,
        next_trainer=second,
        world_size=2,
        settings={"output_dir": "run", "remote_dir": address, "save_on_each_node": True},
    )
    for disk in "abc":
        (tmp_path / disk).mkdir()

    def environ(rank: int) -> dict[str, str]:
        return {**weed.environment(), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    train_on_ranks(case, tmp_path, 2, Part.FIRST, environ, lambda rank: tmp_path / "ab"[rank])
    weights = [sorted((tmp_path / disk).glob("run/checkpoint-*/model*.safetensors")) for disk in "ab"]
    assert all(weights)
    assert not {path.name for path in weights[0]} & {path.name for path in weights[1]}
    points = train_on_ranks(case, tmp_path, 2, Part.SECOND, environ, lambda rank: tmp_path / disks[rank])
    off = largest_deviation(points, expected(RECIPE))
    assert max(off.loss, off.grad_norm) <= EXACT


def check_bytes(proxies: list[Proxy], sizes: dict[str, int]) -> None:
    """No rank reads more than the whole state, and its share of the bytes to verify them.

    The model is so small that ranges of it are read in one piece; larger ones are counted by the tests of
    checkpoint-core.
    """
    states = r"(model|optimizer)[^/]*\.safetensors$"
    whole = sum(size for path, size in sizes.items() if re.search(states, path))
    assert whole > 500_000
    for proxy in proxies:
        # Ranges that lie close together are read with what is between them.
        assert proxy.read(states) <= 1.15 * whole * (1 + 1 / len(proxies))


Pretrain = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    """Starts `llama-pretrain`, which takes longer to import than these runs train."""
    modules = ["llama_pretrain.train", "trainer_core", "trainer_ddp", "torch._dynamo", "matplotlib.figure"]
    start = WarmStart(modules, os.environ)
    yield start
    start.close()


@pytest.fixture
def pretrain(warm: WarmStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretrain:
    """Runs `llama-pretrain train` in the folder of the test, as briefly as it goes."""
    monkeypatch.chdir(tmp_path)
    settings = (
        "--use-cpu --sequence-length 32 --per-device-train-batch-size 2 --sample-tokens 0 --held-out 0 "
        "--warmup-steps 1"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = ["-m", "llama_pretrain", "train", *settings.split(), *words]
        out, err = tmp_path / "out", tmp_path / "err"
        process = warm.start(line, os.environ, out, err)
        try:
            code = process.wait(240)
        finally:
            process.kill()
        return subprocess.CompletedProcess(line, code, out.read_text(), err.read_text())

    return run


@pytest.mark.parametrize("tier", ["output_dir", pytest.param("remote_dir", marks=pytest.mark.full)])
def test_a_lost_directory_continues_the_same_run_or_none(
    proxies: list[Proxy], pretrain: Pretrain, tmp_path: Path, tier: str
) -> None:
    address = f"s3://tests/{uuid.uuid4().hex[:12]}/run"
    where = (
        ["--output-dir", address]
        if tier == "output_dir"
        else ["--output-dir", "runs/a", "--remote-dir", address]
    )
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        for number in range(6):
            (tmp_path / folder / f"{number}.txt").write_text(
                f"the text of {folder} number {number}, to learn"
            )
    first = pretrain(*where, "--data", "one", "--max-steps", "2")
    assert first.returncode == 0, first.stderr
    shutil.rmtree(tmp_path / "runs")
    for wrong in (["--data", "other"], ["--data", "one", "--document-attention"]):
        refused = pretrain(*where, *wrong, "--max-steps", "4")
        assert refused.returncode != 0
        assert f"differs from the run in {address}" in refused.stderr
    second = pretrain(*where, "--data", "one", "--max-steps", "4")
    assert f"resumed from {address}/checkpoint-2 at step 2" in second.stderr
