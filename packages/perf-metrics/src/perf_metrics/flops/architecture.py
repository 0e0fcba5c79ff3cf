"""A model reduced to what its FLOPs depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .accounts import ATTENTION_SCORES, STATE_SCAN, FlopsPart, FlopsPerToken, per_token_of
from .attention import AttentionLayer, Causal, ScanLayer, check_causal


@dataclass(frozen=True)
class WeightGroup:
    """The weight matrices of one layer type, over all layers.

    Attributes:
        kind: The layer type.
        stored: Weights that the model holds.
        active: Weights that a token is multiplied by: of experts, those that it is sent to.
        backward: Multiply-adds per token of the backward pass: 2 x `active` where all is trained.
    """

    kind: str
    stored: int
    active: float
    backward: float


@dataclass(frozen=True)
class Architecture:
    """A model reduced to what its FLOPs depend on.

    Attributes:
        name: Its class or family.
        weights: Weight matrices by layer type.
        mixing: What each layer mixes tokens with, in order.
        parameters: All parameters, shared ones once.
        lookup: Parameters that are only looked up, such as an embedding that is not tied.
    """

    name: str
    weights: tuple[WeightGroup, ...]
    mixing: tuple[AttentionLayer | ScanLayer | None, ...]
    parameters: int
    lookup: int

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The layers with attention."""
        return [layer for layer in self.mixing if isinstance(layer, AttentionLayer)]

    @property
    def idle(self) -> float:
        """Weights of experts that a token is not sent to."""
        return sum(group.stored - group.active for group in self.weights)

    def per_token(self, sequence_length: int, causal: Causal = "full") -> FlopsPerToken:
        """Training FLOPs per token.

        Args:
            sequence_length: S, in tokens; of packed documents that do not attend to one another, their
                length.
            causal: Which keys count for a query; see `AttentionLayer.keys`.

        Raises:
            ValueError: `sequence_length` is not a positive integer, or `causal` is none of the three.
        """
        check_causal(causal)
        check_length(sequence_length)
        parts: dict[str, FlopsPart] = {
            group.kind: FlopsPart(group.kind, 2 * group.active, 2 * group.backward) for group in self.weights
        }
        scores = [(layer.forward(sequence_length, causal), layer.reached) for layer in self.attention_layers]
        scans = [(layer.forward, layer.reached) for layer in self.mixing if isinstance(layer, ScanLayer)]
        for kind, costs in ((ATTENTION_SCORES, scores), (STATE_SCAN, scans)):
            if costs:
                parts[kind] = FlopsPart(kind, *_sums(costs))
        return per_token_of(parts)


def _sums(costs: Iterable[tuple[float, bool]]) -> tuple[float, float]:
    """Forward, and backward: both factors of each product are activations, so twice the forward."""
    costs = list(costs)
    return sum(cost for cost, _ in costs), sum(2 * cost for cost, reached in costs if reached)


def check_length(sequence_length: int) -> None:
    """Raise ValueError unless this is a number of tokens."""
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, int) or sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length!r}: must be a positive integer, in tokens")
