"""Named model shapes."""

from __future__ import annotations

import difflib
from dataclasses import replace

from trainer_core import ConfigurationError

from .config import LlamaConfig

# 7b to 70b are the shapes of Llama 2 (Touvron et al. 2023). Each preset has the number of parameters that its
# name says when the vocabulary is its own; `tiny` is for bytes and learns on a laptop.
_PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        # Near 1 / sqrt(hidden_size); at 0.02 so narrow a model wastes its first hundreds of steps.
        initializer_range=0.09,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    ),
    "160m": LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=12,
    ),
    "1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "7b": LlamaConfig(),
    "13b": LlamaConfig(
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
    ),
    "34b": LlamaConfig(
        hidden_size=8192,
        intermediate_size=22016,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "70b": LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def preset_names() -> tuple[str, ...]:
    """Return the names that `preset` knows, smallest model first."""
    return tuple(_PRESETS)


def preset(name: str, **changes: int | None) -> LlamaConfig:
    """Return a named shape.

    Args:
        name: One of `preset_names()`.
        **changes: Settings to replace, such as the vocabulary and special tokens of a tokenizer.

    Raises:
        ConfigurationError: If there is no such preset, or a change breaks a rule.
    """
    if name not in _PRESETS:
        near = difflib.get_close_matches(name, _PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(
            "model",
            name,
            "is neither a preset nor a directory with a config.json",
            f"{hint}presets: {', '.join(_PRESETS)}",
        )
    return replace(_PRESETS[name], **changes)  # type: ignore[arg-type]
