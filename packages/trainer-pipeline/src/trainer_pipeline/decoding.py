"""Continue texts with a model, token by token."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError, Sampling

Step = Callable[[Tensor, Tensor], Tensor]
"""`(the text so far, what is new of it) -> logits`, those of the last position come last."""


def write_on(
    model: nn.Module,
    input_ids: Tensor,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    eos_token_id: int | None,
    pad_token_id: int | None,
    use_cache: bool,
) -> Tensor:
    """Continue texts; all ranks that the model is on do so together.

    Args:
        model: The model, in evaluation mode.
        input_ids: int64 [rows, positions].
        sampling: How tokens are chosen.
        max_new_tokens: Most tokens to add.
        eos_token_id: Ends a row; it is kept.
        pad_token_id: What fills a row up behind its end; eos_token_id otherwise.
        use_cache: Keep keys and values, if the model takes a cache.

    Returns:
        int64 [rows, positions + new].

    Raises:
        ConfigurationError: If there is no prompt, or a negative number of tokens is asked for.
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ConfigurationError(
            "input_ids", tuple(input_ids.shape), "must be [rows, positions], both 1 or more", "give a prompt"
        )
    if max_new_tokens < 0:
        raise ConfigurationError("max_new_tokens", max_new_tokens, "must be 0 or more", "raise it")
    step = _step(model, input_ids, max_new_tokens) if use_cache else _recomputed(model)
    text, new = input_ids, input_ids
    ended = torch.zeros(len(text), dtype=torch.bool, device=text.device)
    filler = eos_token_id if pad_token_id is None else pad_token_id
    for _ in range(max_new_tokens):
        token = sampling.choose(step(text, new)[:, -1], text)
        if eos_token_id is not None:
            token = torch.where(ended, filler, token) if filler is not None else token
            ended |= token == eos_token_id
        new = token[:, None]
        text = torch.cat([text, new], dim=1)
        if eos_token_id is not None and bool(ended.all()):
            break
    return text


def _step(model: nn.Module, input_ids: Tensor, max_new_tokens: int) -> Step:
    taken = inspect.signature(model.forward).parameters
    if "past_key_values" in taken and "use_cache" in taken:
        return _CachedByTheModel(model)
    make = getattr(model, "make_cache", None)
    if callable(make) and "cache" in taken:
        cache = make(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)
        return lambda text, new: _logits(model(input_ids=new, cache=cache))
    return _recomputed(model)


def _recomputed(model: nn.Module) -> Step:
    return lambda text, new: _logits(model(input_ids=text))


class _CachedByTheModel:
    """Hands the cache that a model of Hugging Face returns back to it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache: object = None

    def __call__(self, text: Tensor, new: Tensor) -> Tensor:
        output = self._model(input_ids=new, past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        return _logits(output)


def _logits(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else cast(Tensor, getattr(output, "logits", None))
