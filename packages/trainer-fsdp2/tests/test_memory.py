"""A rank of four holds a quarter, needs little more in between, and reads a quarter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RANKS = 4
FILES = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
MEBIBYTE = 2**20
HEAP = 48 * MEBIBYTE
"""What the C library may keep of values that were freed, however large the model: while the model is recorded
up to 32 MiB, and then some of the largest tensors of 4 MiB."""


@pytest.fixture
def measured(world: Callable[..., Any]) -> list[Any]:
    """What each rank measured while the model was built, exported and loaded."""
    found: list[Any] = world("four", "4").seen("measured")
    return found


def show(what: str, seen: int, whole: int) -> None:
    print(f"{what}: {seen / MEBIBYTE:.1f} MiB, {seen / whole:.0%} of the whole")


def test_state_is_a_quarter(world: Callable[..., Any]) -> None:
    ranks = world("four", "4").seen("saved")
    alone = ranks[0]["alone"]
    assert alone["gradients"] == alone["parameters"]
    assert alone["optimizer"] >= 2 * alone["parameters"]
    for seen in ranks:
        for kind, size in alone.items():
            assert seen["sizes"][kind] == pytest.approx(size / RANKS, rel=0.05), kind
        held = sum(seen["sizes"].values())
        show("parameters, gradients and optimizer", held, sum(alone.values()))
        assert held == pytest.approx(sum(alone.values()) / RANKS, rel=0.05)
    for kind in ("parameters", "gradients"):
        assert sum(seen["sizes"][kind] for seen in ranks) == alone[kind]


def test_no_rank_has_the_whole_model_while_it_is_built(measured: list[Any]) -> None:
    for seen in measured:
        show("building", seen["peaks"]["building"], seen["whole"])
        assert seen["peaks"]["building"] < min(seen["own"] + HEAP, 0.6 * seen["whole"])


@pytest.mark.parametrize("doing", ["save_model", "export of four files", "loading weights"])
def test_files_cost_less_than_one_tensor(measured: list[Any], doing: str) -> None:
    for seen in measured:
        show(doing, seen["peaks"][doing], seen["whole"])
        assert seen["peaks"][doing] < seen["largest"]


def test_saving_a_checkpoint_costs_less_than_one_tensor(world: Callable[..., Any]) -> None:
    largest = world("four", "4").seen("measured")[0]["largest"]
    for seen in world("four", "4").seen("saved"):
        assert seen["peaks"]["saving"] < largest


@pytest.mark.parametrize(
    ("launch", "where"),
    [("four", "4, resumed"), pytest.param("meta", "4, resumed on meta", marks=pytest.mark.full)],
)
def test_a_resumed_rank_needs_its_part(world: Callable[..., Any], launch: str, where: str) -> None:
    saved = world(launch, "4").seen("saved")[0]
    own = saved["sizes"]["parameters"] + saved["sizes"]["optimizer"]
    whole = saved["alone"]["parameters"] + saved["alone"]["optimizer"]
    for seen in world(launch, where).seen("resumed"):
        assert seen["step"] == 1
        show(where, seen["peaks"]["resuming"], whole)
        assert seen["peaks"]["resuming"] < min(own + HEAP, 0.4 * whole)


def test_bytes_read_are_a_quarter(measured: list[Any]) -> None:
    for seen in measured:
        assert seen["files"] == FILES
        assert seen["equal"], "what was loaded is what was exported"
        show("read", seen["read"], seen["whole"])
        assert seen["read"] == pytest.approx(seen["whole"] / RANKS, rel=0.1)
