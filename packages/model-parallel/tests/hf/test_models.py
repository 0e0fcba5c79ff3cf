"""Unmodified models of transformers, divided by their own plans, train on the curve of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SEQUENCE = {"sequence": True, "loss": "sharded"}
TWO: dict[str, dict[str, Any]] = {
    "llama, sequence and divided loss": {"family": "llama", "model": {"attention": "sdpa"}, **SEQUENCE},
    "llama, tied": {"family": "llama", "model": {"tie_word_embeddings": True}, **SEQUENCE},
    "llama, sequence and fused loss": {"family": "llama", "sequence": True, "loss": "fused"},
    "qwen3, sequence and divided loss": {"family": "qwen3", "model": {"attention": "sdpa"}, **SEQUENCE},
    "gpt_neox, sequence and divided loss": {"family": "gpt_neox", **SEQUENCE},
    "gpt_neox, tied": {"family": "gpt_neox", "model": {"tie_word_embeddings": True}},
    "phi, sequence and divided loss": {"family": "phi", **SEQUENCE},
    "phi3": {"family": "phi3", **SEQUENCE},
    "gemma2, whose logits are capped": {"family": "gemma2", **SEQUENCE},
}
FOUR: dict[str, dict[str, Any]] = {
    "llama, 2 key-value heads and vocabulary 251 over 4": {"family": "llama", "model": {"vocabulary": 251}},
    "llama, 2 key-value heads over 4, sdpa": {"family": "llama", "model": {"attention": "sdpa"}, **SEQUENCE},
    "llama, fully_shard x tensor": {"family": "llama", "layout": "shard=2,tp=2", **SEQUENCE},
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "qwen3": {"family": "qwen3"},
    "gpt_neox": {"family": "gpt_neox"},
    "phi": {"family": "phi", "model": {"num_key_value_heads": 2}},
}


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> dict[str, dict[str, Any]]:
    two, four = (launch("curves.py", ranks, *cases.values())[0] for ranks, cases in ((2, TWO), (4, FOUR)))
    return dict(zip([*TWO, *FOUR], [*two, *four], strict=True))


def hold(found: dict[str, Any]) -> None:
    assert found["bitwise"], "initial values"
    assert found["names"]
    assert found["dtensors"]
    assert found["loss"] < 1e-5, found
    assert found["norm"] < 1e-5, found
    assert found["gradient"] < 1e-5, found


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_the_curve_is_that_of_one_process(notes: dict[str, dict[str, Any]], name: str) -> None:
    hold(notes[name])


@pytest.mark.full
def test_the_same_without_sequence_parallelism(launch: Callable[..., list[Any]]) -> None:
    for found in launch("curves.py", 2, *PLAIN.values())[0]:
        hold(found)
