"""Tiny models of many families: the formula, torch's counter and config.json agree by layer type."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from perf_metrics import (
    FlopsPerToken,
    FlopsUnknownError,
    ModelFlops,
    architecture_of_config,
    architecture_of_model,
    count_flops,
)

LENGTH = 72
"""Longer than the windows below, so that the conventions differ."""

NOT_COMPARED = {"state scan", "short convolution"}
"""What a scan costs depends on how it is cut into chunks; a short convolution is padded."""

SHAPE: dict[str, object] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "pad_token_id": None,
}  # fmt: skip
GROUPED: dict[str, object] = {**SHAPE, "num_key_value_heads": 2}
ROUTED: dict[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, object] = {
    **SHAPE, **ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
STATE: dict[str, object] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "dense": ("llama", SHAPE),
    "grouped queries": ("llama", {**GROUPED, "head_dim": 24}),
    "tied": ("qwen3", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    "one matrix for three": ("phi3", GROUPED),
    "plain mlp": ("gpt_neox", SHAPE),
    "convolutions as matrices": (
        "gpt2", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "sliding window": ("mistral", {**GROUPED, "sliding_window": 32}),
    "alternating windows": ("gemma2", {**GROUPED, "head_dim": 16, "sliding_window": 32}),
    "one full layer of six": (
        "gemma3_text", {**GROUPED, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 32},
    ),
    "experts": ("mixtral", {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "shared expert with a gate": (
        "qwen2_moe", {**GROUPED, **ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 48},
    ),
    "experts in every second layer": (
        "qwen3_moe", {**GROUPED, **ROUTED, "head_dim": 16, "num_experts": 8, "decoder_sparse_step": 2},
    ),
    "experts and windows": (
        "gpt_oss",
        {**GROUPED, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "latent attention": ("deepseek_v3", {**LATENT, "q_lora_rank": 24}),
    "latent attention with plain queries": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "state-space hybrid": ("bamba", {**GROUPED, **STATE, "attn_layer_indices": [1, 3]}),
    "state space": (
        "mamba2",
        {
            "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16,
            "state_size": 16, "n_groups": 2, "chunk_size": 16,
        },
    ),
}  # fmt: skip


def build(family: str, settings: Mapping[str, object]) -> tuple[PreTrainedModel, dict[str, object]]:
    """The model without values, and its config as a file holds it."""
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    # All settings, defaults too; derived ones such as layer_types are what older files lack.
    return model, json.loads(config.to_json_string(use_diff=False))


def parts(flops: FlopsPerToken) -> dict[str, tuple[float, float]]:
    """Forward and backward by layer type."""
    return {part.kind: (part.forward, part.backward) for part in flops.parts}


@pytest.mark.parametrize("name", MODELS)
def test_formula_counter_and_config_agree_by_layer_type(name: str) -> None:
    family, settings = MODELS[name]
    model, config = build(family, settings)
    formula = architecture_of_model(model)
    by_formula = parts(formula.per_token(LENGTH, "dense"))
    by_counter = parts(count_flops(model, LENGTH).per_token())
    assert by_formula.keys() == by_counter.keys()
    for kind in by_formula.keys() - NOT_COMPARED:
        assert by_counter[kind] == pytest.approx(by_formula[kind], rel=1e-9), kind

    known = architecture_of_config(config)
    for causal in ("full", "half", "dense"):
        for kind, figures in parts(formula.per_token(LENGTH, causal)).items():
            assert parts(known.per_token(LENGTH, causal))[kind] == pytest.approx(figures, rel=1e-9), kind
    assert formula.parameters - known.parameters == left_out(model)


def left_out(model: PreTrainedModel) -> int:
    """Parameters that the figures of a config do not tell: norms, biases and what scans and sinks hold."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if name.endswith("bias") or (max(parameter.shape) == parameter.numel() and "expert_gate" not in name)
    )


def test_a_window_shorter_than_the_row_is_seen_in_families_that_have_one() -> None:
    for name in ("sliding window", "alternating windows", "one full layer of six", "experts and windows"):
        architecture = architecture_of_model(build(*MODELS[name])[0])
        windows = [layer.window for layer in architecture.attention_layers]
        full = {"sliding window": 0, "alternating windows": 2, "one full layer of six": 1}.get(name, 2)
        assert windows.count(None) == full
        assert windows.count(32) == len(windows) - full
        ends = architecture.per_token(LENGTH, "full"), architecture.per_token(LENGTH, "dense")
        share = (len(windows) - full) / len(windows)
        assert ends[0].attention / ends[1].attention == pytest.approx(1 - share * (1 - 32 / LENGTH))


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "deepseek_v32"])
def test_layers_that_the_formula_does_not_know_are_refused_by_name(family: str) -> None:
    mixers = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "head_dim": 16,
    } if family == "qwen3_next" else {}  # fmt: skip
    latent = {**LATENT, "q_lora_rank": 24} if family == "deepseek_v32" else {}
    state = {**STATE, "mamba_d_ssm": 128} if family == "falcon_h1" else {}
    model, config = build(family, {**GROUPED, **mixers, **state, **latent})
    with pytest.raises(ValueError, match=r"layers_block_type has|layer_types has"):
        architecture_of_model(model)
    with pytest.raises(ValueError, match=f"model_type='{family}' is not one of the families"):
        architecture_of_config(config)


@pytest.mark.parametrize(
    "family", ["albert", "big_bird", "deberta", "deberta-v2", "fnet", "longformer", "yoso"]
)
def test_layers_that_are_not_what_their_config_tells_are_counted_or_unknown(family: str) -> None:
    config = AutoConfig.for_model(family, **SHAPE | {"pad_token_id": 0, "max_position_embeddings": 80})
    with torch.device("meta"):
        model = AutoModelForMaskedLM.from_config(config)
    with pytest.raises(FlopsUnknownError, match=f"layers of {family} compute otherwise than its config"):
        architecture_of_model(model)
    if family in ("albert", "fnet"):
        flops = ModelFlops(model, LENGTH)
        assert flops.source == "counter"
        assert flops.per_token(LENGTH).total == pytest.approx(count_flops(model, LENGTH).model)
