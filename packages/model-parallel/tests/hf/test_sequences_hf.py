"""Unmodified models of transformers whose sequences are divided train on the curve of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_models
import pytest

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import PlanError, divide_sequences

CASES: dict[str, dict[str, Any]] = {
    "llama, a length that nothing divides": {"family": "llama", "length": 17},
    "llama, documents by their positions": {"family": "llama", "length": 24, "documents": [7, 10, 7]},
    "qwen3, contiguous": {"family": "qwen3", "length": 16, "balanced": False},
    "gpt_neox, a rank that counts no token": {
        "family": "gpt_neox",
        "length": 16,
        "uncounted": 12,
        "balanced": False,
    },
    "phi, padding": {"family": "phi", "length": 16, "padded": 11},
}


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> dict[str, list[dict[str, Any]]]:
    found = launch("sequences.py", 2, *CASES.values())
    return {name: [rank[place] for rank in found] for place, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_the_curve_is_that_of_one_process(notes: dict[str, list[dict[str, Any]]], name: str) -> None:
    for found in notes[name]:
        assert found["loss"] < 1e-6, found
        assert found["norm"] < 1e-5, found
        assert found.get("alone", 0.0) < 1e-5, found
        if "padded" not in CASES[name]:  # where transformers leaves padding to itself
            assert found["whole"] < 1e-5, found


@pytest.mark.parametrize(
    ("family", "settings", "because"),
    [
        ("gemma2", {}, "layer_types=\\['sliding_attention'\\]"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_what_cannot_be_computed_in_parts_is_refused(
    family: str, settings: dict[str, Any], because: str
) -> None:
    model = hf_models.make(family, **settings)
    with DistributedEnvironment(no_accelerator=True):
        mesh = Meshes(ParallelLayout()).context
        with pytest.raises(PlanError, match=f"cannot be divided: its config has {because}"):
            divide_sequences(model, mesh)
    assert model.config._attn_implementation == "eager"
