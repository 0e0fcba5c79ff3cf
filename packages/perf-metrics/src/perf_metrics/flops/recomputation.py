"""Hardware FLOPs: the model's, and what activation checkpointing computes again."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from .accounts import ATTENTION_SCORES, OUTPUT_PROJECTION, FlopsPerToken

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
        raise ValueError(f'recompute={recompute!r}: must be "none", "full" or "attention"')
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: must be between 0 and 1")
    if recompute == "none":
        return flops.total
    if not flops.parts:
        raise ValueError(
            "the FLOPs are not known by layer type, so what is recomputed cannot be told; take those of "
            "flops_per_token_breakdown or count_flops"
        )
    again = sum(part.forward for part in flops.parts if _is_recomputed(part.kind, recompute))
    return flops.total + share * again


def _is_recomputed(kind: str, recompute: Recomputation) -> bool:
    return kind == ATTENTION_SCORES if recompute == "attention" else kind != OUTPUT_PROJECTION
