"""Tiny models of transformers; imported where the extra `hf` is installed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "phi": (PhiConfig, PhiForCausalLM, {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"num_key_value_heads": 2, "pad_token_id": 0}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"num_key_value_heads": 2, "head_dim": 8}),
}


def make(family: str, attention: str = "eager", vocabulary: int = 64, **settings: Any) -> torch.nn.Module:
    """A model with values, in training mode."""
    config, model, own = FAMILIES[family]
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    made: torch.nn.Module = model(config(**{**sizes, **own, **settings}, attn_implementation=attention))
    return made.train()
