"""What is planted in known jobs of the synthetic fleet, by the names of `perf_metrics.ofu.diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Fact: TypeAlias = "bool | int | float | str"
OddKind: TypeAlias = Literal["slow clock", "less work"]

LATENT_EXPERTS = 54.27 / 25.58
HYBRID = 24.51 / 15.56
TOTAL, ACTIVE = 46.7e9, 12.9e9
"""Parameters of a mixture of 8 experts, of which a token passes 2."""
WIDTH, LAYERS, LENGTH, WEIGHTS = 4096, 32, 32_768, 7.5e9
"""An 8B transformer at 32k tokens; the weights are those of its matrix products."""
CAUSAL = (6 * WEIGHTS + 12 * LAYERS * WIDTH * LENGTH) / (6 * WEIGHTS + 7 * LAYERS * WIDTH * LENGTH)
"""1.27"""
FALLEN = "tensor cores wait"
AGREE = "MFU and OFU agree"


@dataclass(frozen=True)
class Mistake:
    """A mistake that parts MFU from OFU.

    Attributes:
        cause: Its name.
        ofu: OFU of the job as a share.
        ratio: MFU/OFU that the mistake gives.
        facts: What the job says of itself beside its MFU.
        alone: Whether ratio and facts leave no other mistake: it must then be the first candidate. Otherwise
            another one gives the very same ratio, and it must be among those that fit.
    """

    cause: str
    ofu: float
    ratio: float
    facts: Mapping[str, Fact] = field(default_factory=dict)
    alone: bool = True


MISTAKES = (
    Mistake("recomputation not counted", 0.42, 0.75),
    Mistake("recomputation not counted", 0.45, 0.75, {"recomputes": True, "experts": False}),
    # Half is what the peak of a faster type gives too; the types tell which of the two it is.
    Mistake("sparse peak used", 0.44, 0.5, {"compute_dtype": "bf16", "peak_dtype": "bf16"}),
    Mistake("sparse peak used", 0.40, 0.5, alone=False),
    Mistake("peak of a faster type", 0.36, 0.5, alone=False),
    Mistake(
        "bf16 work against the fp8 peak",
        0.38,
        0.5,
        {"compute_dtype": "bf16", "peak_dtype": "fp8"},
        alone=False,
    ),
    Mistake("peak of a slower type", 0.31, 2.0),
    Mistake("fp8 work against the bf16 peak", 0.30, 2.0, {"compute_dtype": "fp8", "peak_dtype": "bf16"}),
    Mistake("latent experts counted at full width", 0.2558, LATENT_EXPERTS, {"experts": True}),
    Mistake("hybrid counted as attention and MLP", 0.1556, HYBRID, {"hybrid": True}),
    Mistake(
        "experts counted as dense",
        0.12,
        TOTAL / ACTIVE,
        {"experts": True, "total_parameters": TOTAL, "active_parameters": ACTIVE},
    ),
    Mistake(
        "causal attention not halved",
        0.41,
        CAUSAL,
        {
            "counts_causal_half": False,
            "sequence_length": LENGTH,
            "width": WIDTH,
            "n_layers": LAYERS,
            "matmul_parameters": WEIGHTS,
        },
    ),
    # Without the shapes it is a range, which no other mistake's number lies near.
    Mistake("causal attention not halved", 0.43, CAUSAL),
    Mistake("whole tiles in OFU", 0.64, 1 / 1.2, {"tile_overhead": 0.2}),
)
"""The boost clock in place of the tensor clock is not among them: it falsifies OFU, of the whole report."""


@dataclass(frozen=True)
class Fall:
    """OFU and MFU fall together in the middle of a job, as when a debug flag is left on.

    Attributes:
        at: Share of the job's time after which they fall.
        to: Share of its OFU that is left.
    """

    at: float
    to: float


@dataclass(frozen=True)
class OddGPU:
    """A GPU unlike the others of its job.

    Attributes:
        index: Number of the GPU on its node.
        kind: "slow clock": it runs at 900 MHz and the others wait for it, so that all do the same work;
            "less work": it does three tenths of what the others do.
    """

    index: int
    kind: OddKind


FALLS = (Fall(at=0.55, to=0.63), Fall(at=0.35, to=0.82))
ODD_GPUS = (OddGPU(5, "slow clock"), OddGPU(2, "less work"))
SLOWER_RUN = (0.40, 0.405, 0.395, 0.30)
"""OFU of four jobs of one run, one after the other: the last restart is slower."""
STEADY_RUN = (0.35, 0.345, 0.355, 0.34)
