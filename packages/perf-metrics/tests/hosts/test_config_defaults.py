"""What a config.json leaves out is what transformers fills in, or is asked for."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from perf_metrics import Architecture, FlopsUnknownError, architecture_of_config
from perf_metrics.flops.read_architecture import FAMILIES

SHAPE: dict[str, object] = {
    "vocab_size": 331, "hidden_size": 192, "intermediate_size": 388, "num_hidden_layers": 5,
    "num_attention_heads": 32,
}  # fmt: skip
OTHER_SHAPES: dict[str, dict[str, object]] = {
    "gpt2": {"vocab_size": 331, "n_embd": 192, "n_layer": 5, "n_head": 16},
    "mamba2": {
        "vocab_size": 331, "hidden_size": 128, "num_hidden_layers": 5, "num_heads": 4, "head_dim": 64,
        "state_size": 16,
    },
    "bamba": SHAPE | {"mamba_n_heads": 6, "mamba_d_head": 64, "mamba_d_state": 16},
    "deepseek_v2": SHAPE | {"num_experts_per_tok": 2},
}  # fmt: skip


def found_or_missing(config: dict[str, object]) -> Architecture | str:
    try:
        return architecture_of_config(config)
    except FlopsUnknownError as refusal:
        return str(refusal)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma3"}))
def test_a_short_file_says_what_the_long_one_says(family: str) -> None:
    shape = OTHER_SHAPES.get(family, SHAPE)
    config = AutoConfig.for_model(family, **shape)
    whole = architecture_of_config(json.loads(config.to_json_string(use_diff=False)) | {"model_type": family})
    changed = json.loads(config.to_json_string(use_diff=True)) | {"model_type": family}
    for short in (changed, shape | {"model_type": family}):
        found = found_or_missing(short)
        assert found == whole or (FAMILIES[family].required and str(found).endswith("is not there."))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "opt", **SHAPE, "word_embed_proj_dim": 64},
            "word_embed_proj_dim=64 is not hidden_size",
        ),
        ({"model_type": "llama", **SHAPE, "num_key_value_heads": 7}, "num_key_value_heads=7 does not divide"),
        ({"model_type": "llama", **SHAPE, "layer_types": ["full_attention"]}, "names 1 layers of 5"),
        ({"model_type": ["llama"], **SHAPE}, "model_type='' is not one of the families"),
    ],
)
def test_figures_that_do_not_fit_are_refused(config: dict[str, object], reason: str) -> None:
    with pytest.raises(FlopsUnknownError, match=reason):
        architecture_of_config(config)


def test_a_window_that_is_null_is_none() -> None:
    mistral = {"model_type": "mistral", **SHAPE}
    assert architecture_of_config(mistral).attention_layers[0].window == 4096
    assert architecture_of_config(mistral | {"sliding_window": None}).attention_layers[0].window is None
