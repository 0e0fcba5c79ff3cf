"""Whether a model's own loss is a sum or a mean, told from what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import Enum

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..undisturbed import undisturbed
from .predictions import loss_in
from .token_loss import IGNORE_INDEX

_CLOSE = 1e-3  # relative; the runs compared differ by rounding, or by a whole factor


class Returns(Enum):
    """What a model returns as its loss."""

    SUM = "sum"
    MEAN = "mean"


def find_convention(
    model: nn.Module,
    inputs: Mapping[str, object],
    labels: Tensor,
    count: Callable[[Tensor], Tensor],
    *,
    takes_items: bool,
) -> Returns:
    """Run a model a few times, in evaluation mode and without gradients, and compare its losses.

    Labels that do not count are replaced, so that every rank comes to its answer from its first batch.

    Args:
        model: The module to call, with all wrappers; its modes and the random generators are put back.
        inputs: Its keyword arguments, without labels.
        labels: int64 [batch, sequence].
        count: Declared number of positions that the mean is over.
        takes_items: Whether the model can be called with `num_items_in_batch`.

    Raises:
        ConfigurationError: If the loss is neither, or `count` does not fit it.
    """
    full = labels.masked_fill(labels == IGNORE_INDEX, 0)

    def loss(marked: Tensor, **more: object) -> float:
        return float(loss_in(model(**inputs, labels=marked, **more)))

    with undisturbed(model), _eager(model):
        if takes_items:
            items = [torch.tensor(n, device=labels.device) for n in (1, 2)]
            one, two = (loss(full, num_items_in_batch=number) for number in items)
            if _same(one, 2 * two) and one != 0.0:
                _check_sum(one, loss(full), int(count(full)))
                return Returns.SUM
            if not _same(one, two):
                raise _refusal(
                    f"with num_items_in_batch=1 the model returned {one:.6g}, with 2 it returned {two:.6g}: "
                    "not half of it, so it adds a term that is not a sum over tokens (an auxiliary loss?)",
                    "switch that term off, or compute the loss in a compute_loss_func of your own",
                )
        _check_mean(loss, full, count)
    return Returns.MEAN


def _check_sum(total: float, mean: float, counted: int) -> None:
    if not _same(total, mean * counted):
        raise _refusal(
            f"count gave {counted} for a batch whose sum is {total:.6g} and whose mean is {mean:.6g}, which "
            f"is over {total / mean:.1f} positions",
            "count what the model's mean is over; for a causal language model count=count_next_tokens",
        )


def _check_mean(loss: Callable[[Tensor], float], full: Tensor, count: Callable[[Tensor], Tensor]) -> None:
    """Mean times count must add up over two halves of the positions."""
    positions = torch.arange(full.shape[-1] if full.ndim else 1, device=full.device)
    halves = [full.masked_fill(positions % 2 == parity, IGNORE_INDEX) for parity in (0, 1)]
    counts = [int(count(part)) for part in (full, *halves)]
    if 0 in counts:
        return
    whole, *parts = (loss(part) * n for part, n in zip((full, *halves), counts, strict=True))
    if not _same(whole, sum(parts)):
        raise _refusal(
            f"mean times count is {whole:.6g} over all positions of a batch, but {sum(parts):.6g} when every "
            "other one is left out in turn, so count is not what the model's mean is over",
            "count what the model's mean is over (it must leave out labels of -100); for a causal language "
            "model count=count_next_tokens",
        )


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))


def _refusal(rule: str, fix: str) -> ConfigurationError:
    return ConfigurationError("compute_loss_func", "ModelLoss", rule, fix)


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Run a compiled model without compiling it for the arguments used here."""
    compiled = any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()
    )
    # Asked for only then, as it loads the compiler.
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
