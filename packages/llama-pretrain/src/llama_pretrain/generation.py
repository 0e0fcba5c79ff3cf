"""Continue texts with a model."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_core import ConfigurationError

from .cache import KVCache
from .model import Llama


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
    _check(model, input_ids, max_new_tokens, temperature, top_k, top_p)
    if max_new_tokens == 0:
        return input_ids
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _continue(model, input_ids, max_new_tokens, temperature, top_k, top_p, eos_token_id, generator)
    finally:
        for module, training in modes:
            module.training = training


def _continue(
    model: Llama,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_token_id: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    batch, prompt_length = input_ids.shape
    cache = KVCache(model.config, batch, prompt_length + max_new_tokens)
    ended = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    pieces, new = [input_ids], input_ids
    for _ in range(max_new_tokens):
        logits = model(new, cache=cache)[:, -1]
        token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if eos_token_id is not None:
            token = torch.where(ended, eos_token_id, token)
            ended |= token == eos_token_id
        new = token[:, None]
        pieces.append(new)
        if eos_token_id is not None and bool(ended.all()):
            break
    return torch.cat(pieces, dim=1)


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token per row.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        temperature: As in `generate`.
        top_k: As in `generate`.
        top_p: As in `generate`; applied after `top_k`.
        generator: As in `generate`.

    Returns:
        Token ids `[batch]`, int64.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    scores = logits.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        lowest = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    if top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # A token goes when those before it already reach top_p, so the first one always stays.
        surplus = ordered.cumsum(dim=-1) - ordered >= top_p
        probabilities = probabilities.scatter(-1, order, ordered.masked_fill(surplus, 0.0))
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _check(
    model: Llama,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ConfigurationError(
            "input_ids", tuple(input_ids.shape), "must be [batch, positions], both 1 or more", "give a prompt"
        )
    if max_new_tokens < 0:
        raise ConfigurationError("max_new_tokens", max_new_tokens, "must be 0 or more", "raise it")
    if not 0 <= temperature < float("inf"):
        raise ConfigurationError(
            "temperature", temperature, "must be 0 or more", "use 0 for the most probable token"
        )
    if top_k is not None and top_k < 1:
        raise ConfigurationError("top_k", top_k, "must be 1 or more", "leave it out to draw from all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigurationError(
            "top_p", top_p, "must be above 0 and at most 1", "leave it out to draw from all tokens"
        )
    total, room = input_ids.shape[1] + max_new_tokens, model.config.max_position_embeddings
    if total > room:
        raise ConfigurationError(
            "max_new_tokens",
            max_new_tokens,
            f"with a prompt of {input_ids.shape[1]} tokens needs {total} positions, the model has {room}",
            f"use at most {max(0, room - input_ids.shape[1])}, or a shorter prompt",
        )
