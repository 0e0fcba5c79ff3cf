"""Divided models train on the curve of one process: losses, norms, first gradients, initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

BIASED = {"stacked": True, "bias": True}
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-3}
TWO: dict[str, dict[str, Any]] = {
    "plain": {"steps": 10},
    "sequence and divided loss": {"sequence": True, "loss": "sharded", "steps": 10},
    "fused loss alone": {"loss": "fused", "chunk": None},
    "tied": {"model": {"tied": True}},
    "tied, sequence and fused loss": {"model": {"tied": True}, "sequence": True, "loss": "fused"},
    "biases and stacked layers, sequence": {"model": BIASED, "sequence": True, "loss": "fused"},
    "norm of each head, sequence": {"model": {"norm": True}, "sequence": True, "loss": "sharded"},
    "odd widths": {"model": {"inner": 47, "vocabulary": 251}},
    "label smoothing and z-loss": {"loss": "sharded", "settings": SMOOTHED},
    "label smoothing and z-loss, fused": {
        "model": {"vocabulary": 251, "bias": True},
        "loss": "fused",
        "sequence": True,
        "settings": SMOOTHED,
    },
    "from the meta device": {"meta": True, "sequence": True, "loss": "sharded"},
}
FOUR: dict[str, dict[str, Any]] = {
    "vocabulary 251 over 4, fused": {"model": {"vocabulary": 251}, "sequence": True, "loss": "fused"},
    "2 key-value heads over 4, sequence": {
        "model": {"kv_heads": 2, "bias": True},
        "sequence": True,
        "loss": "sharded",
    },
    "1 key-value head over 4": {"model": {"kv_heads": 1, "norm": True}, "sequence": True},
    "fully_shard x tensor, tied": {
        "layout": "shard=2,tp=2",
        "model": {"tied": True},
        "sequence": True,
        "loss": "sharded",
    },
}
MORE: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "divided loss alone": {"loss": "sharded"},
        "sequence and fused loss": {"sequence": True, "loss": "fused", "steps": 20},
        "biases and stacked layers": {"model": BIASED},
        "norm of each head": {"model": {"norm": True}},
    },
    4: {
        "vocabulary 251 over 4": {"model": {"vocabulary": 251}},
        "2 key-value heads over 4": {"model": {"kv_heads": 2}},
        "fully_shard x tensor": {"layout": "shard=2,tp=2", "model": {"vocabulary": 251}},
        "fully_shard x tensor, fused": {
            "layout": "shard=2,tp=2",
            "model": {"kv_heads": 1, **BIASED, "norm": True},
            "sequence": True,
            "loss": "fused",
        },
        "fully_shard x tensor, fused, vocabulary 251": {
            "layout": "shard=2,tp=2",
            "model": {"vocabulary": 251, "bias": True},
            "loss": "fused",
        },
    },
}
"""By number of ranks: settings that the cases above combine with others."""


@pytest.fixture(scope="module")
def two(launch: Callable[..., list[Any]]) -> dict[str, dict[str, Any]]:
    return dict(zip(TWO, launch("curves.py", 2, *TWO.values())[0], strict=True))


@pytest.fixture(scope="module")
def four(launch: Callable[..., list[Any]]) -> dict[str, dict[str, Any]]:
    return dict(zip(FOUR, launch("curves.py", 4, *FOUR.values())[0], strict=True))


def hold(notes: dict[str, Any]) -> None:
    assert notes["bitwise"], "initial values"
    assert notes["names"]
    assert notes["dtensors"]
    assert notes["clipped"], "gradients are clipped"
    assert notes["loss"] < 1e-5, notes
    assert notes["norm"] < 1e-5, notes
    assert notes["gradient"] < 1e-5, notes


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two: dict[str, dict[str, Any]], name: str) -> None:
    hold(two[name])


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four: dict[str, dict[str, Any]], name: str) -> None:
    hold(four[name])


@pytest.mark.full
@pytest.mark.parametrize("ranks", MORE)
def test_each_setting_by_itself(launch: Callable[..., list[Any]], ranks: int) -> None:
    for notes in launch("curves.py", ranks, *MORE[ranks].values())[0]:
        hold(notes)


def test_a_rank_holds_its_share(two: dict[str, dict[str, Any]], four: dict[str, dict[str, Any]]) -> None:
    assert two["plain"]["held"] / two["plain"]["whole"] < 0.51
    tied = four["fully_shard x tensor, tied"]
    assert tied["held"] / tied["whole"] < 0.26
