"""What ranks gather: tokens and peaks, memory, OFU; in one launch of two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import FakeNvml

pytestmark = pytest.mark.xdist_group("two ranks")

WORKER = Path(__file__).parents[1] / "workers" / "two_ranks.py"
GPU = "GPU-00000000-0000-0000-0000-00000000000"
ACCELERATOR = torch.accelerator.is_available()


@dataclass(frozen=True)
class Told:
    """What both ranks wrote, in their order, and what they said on stderr."""

    ranks: list[dict[str, Any]]
    said: list[str]


@pytest.fixture(scope="module")
def told(nvml_libraries: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("ranks")
    environment = FakeNvml(nvml_libraries, folder).environment(
        "gpus 3\nactivity 0 20\nactivity 1 60\ngpm 2 0\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    return Told(
        [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)],
        "".join(said).splitlines(),
    )


def test_tokens_and_peaks_are_summed_over_the_time_of_the_slowest(told: Told) -> None:
    one, other = (rank["meter"] for rank in told.ranks)
    assert one == other
    assert (one["input_tokens"], one["interval_seconds"], one["tok_per_sec"]) == (300, 3.0, 100.0)
    assert one["mfu"] == pytest.approx(300 * 6 * 8 * 32 / (3.0 * 3e6))


def test_memory_is_in_the_order_of_ranks(told: Told) -> None:
    for rank in told.ranks:
        memory = rank["memory"]
        assert memory["everywhere"] == [
            {"allocated": 10, "reserved": 20, "retries": 0},
            {"allocated": 11, "reserved": 21, "retries": 1},
        ]
        # A rank without figures leaves all without: a shorter list would not tell whose they are.
        assert memory["on_one"] is None
        assert memory["record"].pop("loss") == 1.0
        assert ACCELERATOR or memory["record"] == {}
        assert memory["ofu"] == [[0.5, None], [None, "no \u2018NVML\u2019"]]


def test_what_a_stranger_could_send_is_refused_by_the_name_of_its_rank(told: Told) -> None:
    first, second = (rank["memory"]["refused"] for rank in told.ranks)
    assert first == []
    assert [text.partition(" (")[0] for text in second] == [
        *["rank 0 tells figures that cannot be read"] * 3,
        "rank 0 tells its figures in nan bytes. Do all ranks run one release?",
        "rank 0 tells its figures in -1 bytes. Do all ranks run one release?",
    ]


def test_ofu_is_in_the_order_of_ranks(told: Told) -> None:
    first, second = (rank["ofu"] for rank in told.ranks)
    assert first == second
    both = {"loss": 1.0, "ofu": pytest.approx(0.4), "ofu_per_rank": pytest.approx([0.2, 0.6])}
    assert first[:2] == [both] * 2
    # Not the mean of the others, and no list: a shorter one would not tell whose figures they are.
    assert first[2:] == [{"loss": 1.0, "ofu": None}] * 2
    said = [line for line in told.said if line.startswith("ofu is not known")]
    reason = f"{GPU}2: unavailable: no tensor activity: the device has no GPM, which needs Hopper or newer"
    assert said == [f"ofu is not known on 1 of 2 ranks; rank 1: {reason}"]
