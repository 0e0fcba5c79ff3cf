"""Model FLOPs per token: the accounting of PaLM (arXiv:2204.02311, appendix B).

One multiply-add is 2 FLOPs. A weight used in a matrix multiplication costs 2 FLOPs per token forward, 2 for
the gradient of its input and 2 for its own gradient: 6 N. Attention scores and their product with the values
cost 4 L d S forward and 8 L d S backward: 12 L d S, or half of it for kernels that skip the masked triangle.
Recomputation of activations does not count.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from .accounts import FlopsPerToken, FlopsUnknownError
from .architecture import Architecture, check_length
from .attention import Causal, check_causal
from .counting import CountedFlops, count_flops
from .from_modules import architecture_of_model

if TYPE_CHECKING:
    from torch import nn

FlopsSource: TypeAlias = Literal["model", "formula", "counter"]

_log = logging.getLogger("perf_metrics")


def palm_flops_per_token(
    n_parameters: float,
    n_layers: int,
    d_attention: int,
    sequence_length: int,
    *,
    causal: Literal["full", "half"] = "full",
) -> float:
    """Return 6 N + 12 L d S, the training FLOPs per token of PaLM's appendix B.

    Published tables differ in what they put into N (with or without embeddings) and in `causal`; with plain
    numbers each of them can be computed.

    Args:
        n_parameters: N, the parameters counted.
        n_layers: L, the layers with attention.
        d_attention: d, heads times head size.
        sequence_length: S, in tokens.
        causal: "full" counts the whole score matrix, "half" only the triangle that causal kernels compute.

    Raises:
        ValueError: A number is negative, or `causal` is neither "full" nor "half".
    """
    check_causal(causal)
    numbers = {"n_parameters": n_parameters, "n_layers": n_layers, "d_attention": d_attention}
    for name, number in {**numbers, "sequence_length": sequence_length}.items():
        if not number >= 0 or math.isinf(number):
            raise ValueError(f"{name}={number!r}: must be a finite number, 0 or more")
    return 6.0 * n_parameters + 12.0 * n_layers * d_attention * sequence_length * _factor(causal)


class ModelFlops:
    """Model FLOPs per token of one model, at any sequence length.

    Where they come from is settled once, in this order:

    - "model": its own method `flops_per_token(sequence_length)`, which returns a `FlopsPerToken` in the
      "full" convention, or one number for everything, which cannot be halved, or None if it does not know;
    - "formula": its modules and `config`, see `architecture_of_model`;
    - "counter": torch's formulas for the operators that it calls, see `count_flops`. It is run at the usual
      length and at half of it; FLOPs per token lie on a straight line between and beyond.

    Args:
        model: The model itself, on any device, meta included; of `DistributedDataParallel`, its `module`.
        sequence_length: A usual length, in tokens, at which the model can be run.

    Raises:
        ValueError: `sequence_length` is not a positive integer.

    Attributes:
        source: Which of the three it is; None if the FLOPs cannot be told.
        reason: Why the ones before it, or all of them, could not tell; empty for the first that could.
        counted: What was counted at the usual length, if that is where they come from.
    """

    def __init__(self, model: nn.Module, sequence_length: int) -> None:
        check_length(sequence_length)
        self._model = model
        self._architecture: Architecture | None = None
        self._length = sequence_length
        self._half: FlopsPerToken | None = None
        self.counted: CountedFlops | None = None
        self.source: FlopsSource | None = None
        self.reason = ""
        if callable(getattr(model, "flops_per_token", None)):
            self.source = "model"
            return
        try:
            self._architecture = architecture_of_model(model)
            self.source = "formula"
        except FlopsUnknownError as reason:
            self.reason = str(reason)
            self._count()

    def _count(self) -> None:
        try:
            self.counted = count_flops(self._model, self._length)
            self.source = "counter"
        except FlopsUnknownError as reason:
            self.reason = f"{self.reason.removesuffix('; count_flops counts it instead')}; {reason}"

    def per_token(self, sequence_length: int, *, causal: Causal = "full") -> FlopsPerToken:
        """Return the training FLOPs per token, forward and backward.

        Args:
            sequence_length: S, in tokens; of packed documents that do not attend to one another, their
                length.
            causal: "full" counts all keys of a query, or those within its window; "half" those that a causal
                mask leaves; "dense" all of them whatever the window. What was counted is "dense", and "full"
                is taken for the same there, as windows are not known.

        Raises:
            ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
            FlopsUnknownError: The FLOPs cannot be told, with the reason.
        """
        check_causal(causal)
        check_length(sequence_length)
        if self.source == "model":
            return _from_hook(self._model, sequence_length, causal)
        if self._architecture is not None:
            return self._architecture.per_token(sequence_length, causal)
        if self.counted is None:
            raise FlopsUnknownError(self.reason)
        return self._on_line(self.counted.per_token(), sequence_length, _factor(causal))

    def _on_line(self, whole: FlopsPerToken, length: int, attention_factor: float) -> FlopsPerToken:
        if length == self._length:
            return replace(whole, attention=whole.attention * attention_factor)
        if self._half is None:
            self._half = self._at_half(whole)
        away = (length - self._length) / (self._length - self._length // 2)

        def at(here: float, half: float) -> float:
            return here + (here - half) * away

        return FlopsPerToken(
            at(whole.matmul, self._half.matmul),
            at(whole.attention, self._half.attention) * attention_factor,
            at(whole.state, self._half.state),
        )

    def _at_half(self, whole: FlopsPerToken) -> FlopsPerToken:
        try:
            return count_flops(self._model, max(1, self._length // 2)).per_token()
        except FlopsUnknownError:
            # A model of one length: what is booked as attention grows with it.
            return replace(whole, attention=whole.attention / 2)


def flops_per_token_breakdown(
    model: nn.Module, sequence_length: int, *, causal: Causal = "full"
) -> FlopsPerToken:
    """Return the training FLOPs per token of a model, by part and by layer type.

    Where they come from, and what the arguments mean, is said at `ModelFlops`.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
        FlopsUnknownError: The FLOPs cannot be told, with the reason.
    """
    return ModelFlops(model, sequence_length).per_token(sequence_length, causal=causal)


def model_flops_per_token(model: nn.Module, sequence_length: int, *, causal: Causal = "full") -> float | None:
    """Return the training FLOPs per token (forward and backward), or None when they cannot be told.

    Where they come from is said at `ModelFlops`. The reason for a None is logged once as a warning of the
    logger "perf_metrics".

    Args:
        model: The model, on any device, meta included.
        sequence_length: S, in tokens.
        causal: Which keys count for a query; see `ModelFlops.per_token`.

    Raises:
        ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
    """
    try:
        return flops_per_token_breakdown(model, sequence_length, causal=causal).total
    except FlopsUnknownError as reason:
        warn_once(str(reason))
        return None


def _from_hook(model: nn.Module, sequence_length: int, causal: Causal) -> FlopsPerToken:
    owner = type(model).__name__
    answer = getattr(model, "flops_per_token")(sequence_length)  # noqa: B009 - a Module's attribute has no type
    if isinstance(answer, FlopsPerToken):
        return FlopsPerToken(answer.matmul, answer.attention * _factor(causal), answer.state)
    if answer is None:
        raise FlopsUnknownError(f"model FLOPs of {owner} unknown: its flops_per_token returned None")
    if isinstance(answer, bool) or not isinstance(answer, int | float) or not 0 < answer < math.inf:
        raise ValueError(
            f"{owner}.flops_per_token returned {answer!r}: must be a positive number, a FlopsPerToken, or "
            "None when it cannot be told"
        )
    if causal == "half":
        raise FlopsUnknownError(
            f"{owner}.flops_per_token returned one number, so its attention part cannot be halved; return a "
            'FlopsPerToken from it, or use causal="full"'
        )
    return FlopsPerToken(float(answer), 0.0)


def _factor(causal: Causal) -> float:
    return 0.5 if causal == "half" else 1.0


@functools.lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a warning, the first time that it is given."""
    _log.warning("%s", message)
