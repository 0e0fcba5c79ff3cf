"""What the FLOPs of a model depend on, its FLOPs by layer type, and the conventions for counting."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from .attention import AttentionLayer, Causal, ScanLayer, check_causal

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


_OUTPUTS = {"output", "head", "unembed", "output_projection"}
_ANYWHERE = {"lm_head", "embed_out"}
_RULES = (
    # In this order: an expert lies in an mlp, a gate beside the experts.
    (SHARED_EXPERTS, re.compile(r"shared_?experts?|shared_mlp")),
    (ROUTED_EXPERTS, re.compile(r"(^|\.)(experts?|input_linear|output_linear)(\.|$)")),
    (ROUTER, re.compile(r"(^|\.)(gate|router|wg|gating)(\.|$)")),
    (STATE_PROJECTIONS, re.compile(r"mamba|ssm|linear_attn|delta_?net|lightning|recurrent")),
    (ATTENTION_PROJECTIONS, re.compile(r"attn|attention|(^|\.)[qkvo]_proj(\.|$)")),
    (STATE_PROJECTIONS, re.compile(r"mixer\.(in|out)_proj|mixer\.conv1d|(^|\.)mixer$")),
    (MLP, re.compile(r"mlp|ffn|feed_?forward|(^|\.)(fc\d?|w[123]|(gate|up|down)_proj)(\.|$)")),
)


def kind_of(path: str) -> str:
    """Return the layer type of the module at a path, "other linear" where its name does not tell."""
    name = path.rpartition(".")[2]
    if name in _ANYWHERE or (name in _OUTPUTS and path.count(".") <= 1):
        return OUTPUT_PROJECTION
    return next((kind for kind, rule in _RULES if rule.search(path)), OTHER)


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

    @property
    def active_parameters(self) -> float:
        """Parameters that take part for a token: all but those of experts that it is not sent to."""
        return self.parameters - self.idle

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
        raise ValueError(f"sequence_length={sequence_length!r} must be a positive integer, in tokens.")


Recomputation: TypeAlias = Literal["none", "full", "attention"]


def hardware_flops_per_token(
    flops: FlopsPerToken, recompute: Recomputation = "none", *, share: float = 1.0
) -> float:
    """Return the FLOPs per token that are executed, recomputation included: the numerator of HFU.

    Args:
        flops: The model FLOPs by layer type, from `flops_per_token_breakdown`.
        recompute: What the backward pass computes for the second time. "none"; "full": the forward of whole
            layers, the output projection not among them; "attention": the scores and their product with the
            values (selective recomputation, Korthikanti et al. 2022, arXiv:2205.05198).
        share: Share of the layers that do it, 0 to 1: half for every second one.

    Raises:
        ValueError: `recompute` is none of the three, `share` is out of range, or only sums are known.
    """
    if recompute not in get_args(Recomputation):
        raise ValueError(f'recompute={recompute!r} must be "none", "full" or "attention".')
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r} must be between 0 and 1.")
    if recompute == "none":
        return flops.total
    if not flops.parts:
        raise ValueError(
            "the FLOPs are not known by layer type, so what is recomputed cannot be told. Take those of "
            "flops_per_token_breakdown or count_flops."
        )
    again = sum(part.forward for part in flops.parts if _is_recomputed(part.kind, recompute))
    return flops.total + share * again


def _is_recomputed(kind: str, recompute: Recomputation) -> bool:
    return kind == ATTENTION_SCORES if recompute == "attention" else kind != OUTPUT_PROJECTION


_FUSED = 3.5 / 3
"""Fused attention does seven products forward and backward where six are needed."""


@dataclass(frozen=True)
class Convention:
    """One way to count the training FLOPs per token.

    Attributes:
        name: Short name.
        counts: What it counts, as a formula.
        used_by: Who publishes figures in it.
        per_token: From the architecture and the sequence length.
    """

    name: str
    counts: str
    used_by: str
    per_token: Callable[[Architecture, int], float]


def _model(architecture: Architecture, length: int) -> float:
    return architecture.per_token(length).total


def _halved(architecture: Architecture, length: int) -> float:
    return architecture.per_token(length, "half").total


def _all_parameters(architecture: Architecture, length: int) -> float:
    return 6.0 * architecture.parameters + architecture.per_token(length, "dense").attention


def _torchtitan(architecture: Architecture, length: int) -> float:
    used = architecture.parameters - architecture.lookup - architecture.idle
    return 6.0 * used + architecture.per_token(length, "dense").attention


def _megatron(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length)
    router = sum(part.total for part in flops.parts if part.kind == ROUTER)
    dense = architecture.per_token(length, "dense").attention
    return flops.matmul - router + dense / 2 + flops.state


def _counter(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "dense")
    return flops.matmul + flops.attention * _FUSED


def _executed(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "half")
    return flops.matmul + flops.attention * _FUSED + flops.state


def _executed_twice(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "half")
    return _executed(architecture, length) + hardware_flops_per_token(flops, "full") - flops.total


def _llm_foundry_hardware(architecture: Architecture, length: int) -> float:
    return _all_parameters(architecture, length) * 4 / 3


def _korthikanti_hardware(architecture: Architecture, length: int) -> float:
    flops = architecture.per_token(length, "dense")
    return flops.total + flops.attention


CONVENTIONS = (
    Convention(
        "model",
        "6 N + 12 L d S; N: weights of matrix products, the output projection in, the lookup out, of experts "
        "those used; windows cut S",
        "this package, for MFU (PaLM, appendix B)",
        _model,
    ),
    Convention("model, causal half", "the same with 6 L d S", "this package, causal='half'", _halved),
    Convention(
        "all parameters",
        "6 N + 12 L d S; N: every parameter, lookup, norms and idle experts in",
        "nanoGPT, llm-foundry (MFU), torchtitan's Llama 3 tables",
        _all_parameters,
    ),
    Convention(
        "torchtitan",
        "6 N + 12 L d S; N: parameters used, less an untied lookup",
        "torchtitan at b5bcd76",
        _torchtitan,
    ),
    Convention(
        "megatron",
        "6 N + 6 L d S; N: weights of matrix products without routers",
        "Megatron-LM at 001b00c, num_floating_point_operations",
        _megatron,
    ),
    Convention(
        "torch counter",
        "6 N + 14 L d S; fused attention computes the scores again, masks do not count",
        "torch.utils.flop_counter",
        _counter,
    ),
    Convention(
        "executed",
        "6 N + 7 L d S: fused causal attention, no activation checkpointing",
        "what the tensor cores run; to hold against hardware counters",
        _executed,
    ),
    Convention(
        "executed, full recomputation",
        "the same with the forward of all layers again",
        "what the tensor cores run with full activation checkpointing",
        _executed_twice,
    ),
    Convention(
        "llm-foundry HFU",
        "4/3 of all parameters",
        "llm-foundry (HFU with activation checkpointing)",
        _llm_foundry_hardware,
    ),
    Convention(
        "Korthikanti HFU",
        "6 N + 24 L d S: attention counted twice",
        "Korthikanti et al. 2022, selective recomputation",
        _korthikanti_hardware,
    ),
)
"""Every convention, this package's own first."""


def convention(name: str) -> Convention:
    """Return a convention by its name.

    Raises:
        ValueError: There is none of that name.
    """
    known = {convention.name: convention for convention in CONVENTIONS}
    if name not in known:
        raise ValueError(f"convention {name!r} is not one of {', '.join(known)}.")
    return known[name]
