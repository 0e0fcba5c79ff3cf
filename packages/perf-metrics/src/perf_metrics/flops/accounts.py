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


def halved(flops: FlopsPerToken) -> FlopsPerToken:
    """The same with half of the attention, as a causal mask leaves it."""
    parts = {
        part.kind: FlopsPart(part.kind, part.forward / 2, part.backward / 2)
        if part.kind == ATTENTION_SCORES
        else part
        for part in flops.parts
    }
    if parts:
        return per_token_of(parts)
    return FlopsPerToken(flops.matmul, flops.attention / 2, flops.state)


def between(near: FlopsPerToken, far: FlopsPerToken, share: float) -> FlopsPerToken:
    """What lies at a share, 0 to 1, of the way from one to the other, by layer type."""
    ends = [{part.kind: (part.forward, part.backward) for part in flops.parts} for flops in (near, far)]

    def at(kind: str, index: int) -> float:
        here, there = (end.get(kind, (0.0, 0.0))[index] for end in ends)
        return here + (there - here) * share

    kinds = [kind for kind in KINDS if any(kind in end for end in ends)]
    return per_token_of({kind: FlopsPart(kind, at(kind, 0), at(kind, 1)) for kind in kinds})


def grid_around(length: int, steps: int = 8) -> tuple[int, int]:
    """The two lengths nearest to this one, below and above, on a grid of so many steps to the octave.

    A length that lies on the grid is the lower of the two.
    """
    octave = 1 << (length.bit_length() - 1)
    step = max(1, octave // steps)
    below = octave + (length - octave) // step * step
    return below, below + step
