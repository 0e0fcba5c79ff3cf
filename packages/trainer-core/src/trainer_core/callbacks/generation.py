"""Generates text with a model's own `generate` and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from ..errors import ConfigurationError

Generate: TypeAlias = Callable[[nn.Module, str], str]
"""Called with the model, in evaluation mode, and a prompt; returns the text that follows."""

INPUTS = ("input_ids", "attention_mask")
"""What is handed from the tokenizer to `model.generate`."""


def generate_with_model(model: nn.Module, tokenizer: object, options: Mapping[str, object]) -> Generate:
    """A function that goes on from a prompt by `model.generate`, as Hugging Face models have it.

    Args:
        model: A causal language model with `generate`.
        tokenizer: Called as `tokenizer(prompt, return_tensors="pt")`; has `decode`.
        options: Keywords of `model.generate`.

    Raises:
        ConfigurationError: The model has no `generate`, or the tokenizer cannot encode and decode.
    """
    if not callable(getattr(model, "generate", None)):
        raise ConfigurationError(
            "generate", None, f"is needed, since {type(model).__name__} has no generate()", "give a function"
        )
    decode = getattr(tokenizer, "decode", None)
    if not callable(tokenizer) or not callable(decode):
        raise ConfigurationError(
            "processing_class",
            tokenizer,
            "is no tokenizer that encodes prompts and decodes texts",
            "give the Trainer a tokenizer, or give TextSamples a generate function",
        )

    def generate(model: nn.Module, prompt: str) -> str:
        device = next(model.parameters()).device
        encoded = tokenizer(prompt, return_tensors="pt")
        # Tokenizers may add inputs that generate() refuses, such as token_type_ids.
        inputs = {name: encoded[name].to(device) for name in INPUTS if name in encoded}
        written: torch.Tensor = model.generate(**inputs, **options)  # type: ignore[operator]
        return str(decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return generate
