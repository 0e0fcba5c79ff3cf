"""What is known of a job when its MFU is held against its OFU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .process_checks import Finding

RATES = {"fp4": 4.0, "fp8": 2.0, "bf16": 1.0, "fp16": 1.0, "tf32": 0.5}
"""Dense tensor peaks relative to BF16: of an H100, and for FP4 of a B200 (of a B300 it is 6)."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What is known of a job; each fact sharpens a candidate or rules it out. None is unknown.

    Attributes:
        recomputes: Whether activations are recomputed in the backward pass.
        experts: Whether the model is a mixture of experts.
        hybrid: Whether layers differ in kind (attention, state space, MLP).
        total_parameters: Parameters of all experts together.
        active_parameters: Those that a token passes.
        counts_causal_half: Whether the FLOP count halves attention for the causal mask.
        sequence_length: In tokens.
        width: Heads x head size of attention.
        n_layers: Number of layers with attention.
        matmul_parameters: Weights of matrix products, head included. Without it, 12 x width^2 a layer.
        compute_dtype: Type that the matrix products run in: fp4, fp8, bf16, fp16 or tf32.
        peak_dtype: Type whose peak MFU is held against.
        tile_overhead: Work that tiles add to the shapes, as a share; about 0.02 to 0.09 when unknown.
        tensor_mhz: Clock in MHz of the tensor peak; the default is that of H100 SXM.
        boost_mhz: Boost limit of the SMs in MHz, which may have been taken in its place.
        usual_ofu: OFU of the same job in good times.
        findings: What `check_process` found in the job.
    """

    recomputes: bool | None = None
    experts: bool | None = None
    hybrid: bool | None = None
    total_parameters: float | None = None
    active_parameters: float | None = None
    counts_causal_half: bool | None = None
    sequence_length: int | None = None
    width: int | None = None
    n_layers: int | None = None
    matmul_parameters: float | None = None
    compute_dtype: str | None = None
    peak_dtype: str | None = None
    tile_overhead: float | None = None
    tensor_mhz: float = 1830.0
    boost_mhz: float = 1980.0
    usual_ofu: float | None = None
    findings: Sequence[Finding] = ()

    def __post_init__(self) -> None:
        for name in ("total_parameters", "active_parameters", "sequence_length", "width", "n_layers"):
            _check_positive(name, getattr(self, name))
        for name in ("matmul_parameters", "tensor_mhz", "boost_mhz", "usual_ofu"):
            _check_positive(name, getattr(self, name))
        for name in ("compute_dtype", "peak_dtype"):
            if getattr(self, name) not in (None, *RATES):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(RATES)}, or None"
                )
        if self.tile_overhead is not None and not 0 <= self.tile_overhead < math.inf:
            raise ValueError(f"tile_overhead={self.tile_overhead!r}: must be a share of 0 or more")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: must be a positive number, or None when it is unknown")
