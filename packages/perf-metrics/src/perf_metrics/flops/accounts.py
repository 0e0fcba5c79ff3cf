"""What one token costs, by layer type."""

from __future__ import annotations

from dataclasses import dataclass, field

ATTENTION_PROJECTIONS = "attention projections"
ATTENTION_SCORES = "attention scores"
MLP = "mlp"
ROUTED_EXPERTS = "routed experts"
SHARED_EXPERTS = "shared experts"
ROUTER = "router"
STATE_PROJECTIONS = "state-space projections"
SHORT_CONVOLUTION = "short convolution"
STATE_SCAN = "state scan"
OTHER = "other linear"
OUTPUT_PROJECTION = "output projection"

KINDS = (
    ATTENTION_PROJECTIONS,
    ATTENTION_SCORES,
    MLP,
    ROUTER,
    ROUTED_EXPERTS,
    SHARED_EXPERTS,
    STATE_PROJECTIONS,
    SHORT_CONVOLUTION,
    STATE_SCAN,
    OTHER,
    OUTPUT_PROJECTION,
)
"""Every layer type, in the order of tables."""


class FlopsUnknownError(ValueError):
    """The model FLOPs of this model cannot be told; the message says why and what to do."""


@dataclass(frozen=True)
class FlopsPart:
    """FLOPs per token of one layer type, over all layers of the model.

    Attributes:
        kind: The layer type, such as "attention projections" or "routed experts".
        forward: Of the forward pass.
        backward: Of the backward pass: gradients of inputs and of trained weights.
    """

    kind: str
    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs per token of one training step, forward and backward.

    Attributes:
        matmul: Of the weight matrices, the output projection included and the embedding lookup left out; of
            experts, those that a token is sent to.
        attention: Of the scores and their product with the values.
        state: Of the scans of state-space layers.
        parts: The same by layer type; empty where only the sums are known.
    """

    matmul: float
    attention: float
    state: float = 0.0
    parts: tuple[FlopsPart, ...] = field(default=(), compare=False)

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.matmul + self.attention + self.state


def per_token_of(parts: dict[str, FlopsPart]) -> FlopsPerToken:
    """Sum parts by layer type up, in the order of tables."""
    ordered = tuple(parts[kind] for kind in KINDS if kind in parts)
    attention = sum(part.total for part in ordered if part.kind == ATTENTION_SCORES)
    state = sum(part.total for part in ordered if part.kind == STATE_SCAN)
    return FlopsPerToken(sum(part.total for part in ordered) - attention - state, attention, state, ordered)
