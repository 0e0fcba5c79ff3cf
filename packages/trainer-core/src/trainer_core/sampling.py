"""Choose the next token of a text from logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int | None = None
    """Draw from so many most probable tokens only; none: from all."""
    top_p: float | None = None
    """Draw from the fewest most probable tokens whose probabilities sum to this or more (Holtzman et al.
    2020); applied after `top_k`; none: from all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that are in the text already, and multiplies negative ones (Keskar et
    al. 2019); 1: leaves them."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(
                "temperature", self.temperature, "must be 0 or more", "use 0 for the most probable token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigurationError(
                "top_k", self.top_k, "must be 1 or more", "leave it out to draw from all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(
                "top_p", self.top_p, "must be above 0 and at most 1", "leave it out to draw from all tokens"
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigurationError(
                "repetition_penalty", self.repetition_penalty, "must be above 0", "use 1 for none"
            )

    def choose(
        self, logits: Tensor, seen: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Choose one token per row.

        Args:
            logits: [rows, vocabulary], any floating dtype.
            seen: int64 [rows, positions], the text so far, for `repetition_penalty`.
            generator: Source of randomness, on the device of the logits; torch's default one otherwise.

        Returns:
            int64 [rows].
        """
        scores = logits.float()
        if self.repetition_penalty != 1.0 and seen is not None:
            scores = _penalised(scores, seen, self.repetition_penalty)
        if self.temperature == 0:
            return scores.argmax(dim=-1)
        scores = scores / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            lowest = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < lowest, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if self.top_p is not None:
            probabilities = _nucleus(probabilities, self.top_p)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _penalised(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    those = scores.gather(-1, seen)
    return scores.scatter(-1, seen, torch.where(those > 0, those / penalty, those * penalty))


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    ordered, order = probabilities.sort(dim=-1, descending=True)
    # A token goes when those before it already reach the share, so the first one always stays.
    surplus = ordered.cumsum(dim=-1) - ordered >= share
    return probabilities.scatter(-1, order, ordered.masked_fill(surplus, 0.0))
