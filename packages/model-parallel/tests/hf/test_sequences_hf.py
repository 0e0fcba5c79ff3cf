"""Unmodified models of transformers whose sequences are divided train on the curve of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hf_models
import pytest
import torch
from transformers import BartConfig, BartForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import PlanError, divide_sequences

CASES: dict[str, dict[str, Any]] = {
    "llama, a length that nothing divides": {"family": "llama", "length": 17},
    "llama, documents by their positions": {"family": "llama", "length": 24, "documents": [7, 10, 7]},
    "qwen3, contiguous": {"family": "qwen3", "length": 16, "balanced": False},
    "llama, ring, documents": {
        "family": "llama",
        "length": 23,
        "documents": [7, 10, 6],
        "exchange": "ring",
    },
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
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rope_parameters='dynamic'",
        ),
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


class Local(LlamaAttention):
    """Attends by itself."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return self.o_proj(self.q_proj(hidden_states)), None


def test_attention_that_transformers_cannot_choose_is_refused() -> None:
    model = hf_models.make("llama")
    model.model.layers[1].self_attn = Local(model.config, 1)
    refused = pytest.raises(PlanError, match="lets the attention of 1 of its 2 layers be chosen")
    with DistributedEnvironment(no_accelerator=True), refused:
        divide_sequences(model, Meshes(ParallelLayout()).context)
    assert model.config._attn_implementation == "eager"


def test_a_model_that_leaves_positions_unused_is_refused() -> None:
    config = BartConfig(
        vocab_size=61, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16
    )
    with (
        DistributedEnvironment(no_accelerator=True),
        pytest.raises(PlanError, match="BartForCausalLM cannot be divided: its forward has no parameter"),
    ):
        divide_sequences(BartForCausalLM(config), Meshes(ParallelLayout()).context)


def test_documents_are_found_as_transformers_finds_them() -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64)
    positions = torch.arange(4).repeat(2)[None]
    with DistributedEnvironment(no_accelerator=True):
        part = divide_sequences(hf_models.make("llama"), Meshes(ParallelLayout()).context)
        found = part.cut({"input_ids": ids, "position_ids": positions})
        assert found["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
        masked = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
        assert "document_ids" not in part.cut(masked), "with a mask it takes them for one"
        with pytest.raises(ValueError, match="document_ids are given without position_ids"):
            part.cut({"input_ids": ids, "document_ids": ids})
        with pytest.raises(ValueError, match="seq_idx tells transformers which positions"):
            part.cut({"input_ids": ids, "seq_idx": ids})
