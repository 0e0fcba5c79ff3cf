"""Continue texts with a model."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_core import ConfigurationError, Sampling

from .llama import Llama


@torch.no_grad()
def generate(
    model: Llama,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue token sequences, one token at a time.

    Args:
        model: The model. It runs in evaluation mode; afterwards each of its modules has its own mode again.
        input_ids: Prompts of one length `[batch, positions]`, int64, on the model's device.
        max_new_tokens: Most tokens to add.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Draw from the `top_k` most probable tokens only.
        top_p: Draw from the fewest most probable tokens whose probabilities sum to `top_p` or more
            (Holtzman et al. 2020).
        eos_token_id: Token that ends a sequence. It is kept, and the sequence is filled up with it.
            Generation stops when every sequence has ended.
        generator: Source of randomness, on the model's device; torch's default one when not given.

    Returns:
        Prompts and continuations `[batch, positions + new]`, int64.

    Raises:
        ConfigurationError: If a setting is out of range, or the result would not fit the model's positions.
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    _check(model, input_ids, max_new_tokens)
    if max_new_tokens == 0:
        return input_ids
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _continue(model, input_ids, max_new_tokens, sampling, eos_token_id, generator)
    finally:
        for module, training in modes:
            module.training = training


def _continue(
    model: Llama,
    input_ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    eos_token_id: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    batch, prompt_length = input_ids.shape
    cache = model.make_cache(batch, prompt_length + max_new_tokens)
    ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    pieces, new = [input_ids], input_ids
    for _ in range(max_new_tokens):
        token = sampling.choose(model(new, cache=cache)[:, -1], generator=generator)
        if eos_token_id is not None:
            token = torch.where(ended, eos_token_id, token)
            ended |= token == eos_token_id
        new = token[:, None]
        pieces.append(new)
        if eos_token_id is not None and bool(ended.all()):
            break
    return torch.cat(pieces, dim=1)


def _check(model: Llama, input_ids: Tensor, max_new_tokens: int) -> None:
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ConfigurationError(
            "input_ids", tuple(input_ids.shape), "must be [batch, positions], both 1 or more", "give a prompt"
        )
    if max_new_tokens < 0:
        raise ConfigurationError("max_new_tokens", max_new_tokens, "must be 0 or more", "raise it")
    total, room = input_ids.shape[1] + max_new_tokens, model.config.max_position_embeddings
    if total > room:
        raise ConfigurationError(
            "max_new_tokens",
            max_new_tokens,
            f"with a prompt of {input_ids.shape[1]} tokens needs {total} positions, the model has {room}",
            f"use at most {max(0, room - input_ids.shape[1])}, or a shorter prompt",
        )
