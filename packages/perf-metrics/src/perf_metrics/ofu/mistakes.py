"""The mistakes that part MFU from OFU, each with the ratio that it alone would give.

Signatures: "Instant GPU Efficiency Visibility at Fleet Scale", and the FLOP counts of PaLM (6 N + 12 L d S
per token) and of fused causal attention (6 N + 7 L d S).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .job_facts import RATES, JobFacts

FITS = 0.05
"""OFU is off by 1.9 points on average (H100, FP16, same paper): 5 % of an OFU of 0.38."""

LATENT_EXPERTS = 54.27 / 25.58
"""A 16B mixture of experts, activations projected from 2048 to 512 before routing: case 1 of the paper."""
HYBRID = 24.51 / 15.56
"""An 8B hybrid counted as if each layer were attention and a dense MLP: case 2 of the paper."""


@dataclass(frozen=True)
class Mistake:
    """A mistake and MFU/OFU with it, lowest and highest; `in_ofu` if it is OFU that it falsifies."""

    name: str
    low: float
    high: float
    why: str
    check: str
    in_ofu: bool = False


def mistakes(ofu: float, facts: JobFacts) -> Iterator[Mistake | str]:
    """Yield each mistake, or why it cannot be judged."""
    yield from _slow(ofu, facts)
    yield from _count(facts)
    yield from _experts(facts)
    yield _causal(facts)
    yield from _peak(facts)
    yield from _counters(facts)


def _slow(ofu: float, facts: JobFacts) -> Iterator[Mistake]:
    for finding in facts.findings:
        yield Mistake(
            f"slowed by {finding.setting}",
            1.0,
            1.0,
            f"the count is right and the tensor cores wait ({finding.setting}={finding.value}): 1",
            f"{finding.effect}; {finding.fix}",
        )
    fallen = facts.usual_ofu is not None and ofu < facts.usual_ofu * (1 - FITS)
    was = f", OFU was {facts.usual_ofu:.1%}" if fallen else ""
    yield Mistake(
        "tensor cores wait" if fallen else "MFU and OFU agree",
        1.0,
        1.0,
        f"the count is right{was}: 1",
        "if both are low: check_process() in the job, then a profiler trace",
    )


def _count(facts: JobFacts) -> Iterator[Mistake | str]:
    name = "recomputation not counted"
    yield (
        f"{name}: the job recomputes nothing"
        if facts.recomputes is False
        else Mistake(
            name,
            0.75,
            0.75,
            "MFU counts 3 passes where full recomputation runs 4: 3/4",
            "is activation checkpointing on? MFU leaves it out by definition; compare HFU with OFU then",
        )
    )
    name = "hybrid counted as attention and MLP"
    yield (
        f"{name}: the layers are all of one kind"
        if facts.hybrid is False
        else Mistake(
            name,
            HYBRID,
            HYBRID,
            "an 8B hybrid of the paper, 24.51 / 15.56; other models give other numbers",
            "count FLOPs per layer type",
        )
    )


def _experts(facts: JobFacts) -> Iterator[Mistake | str]:
    dense, latent = "experts counted as dense", "latent experts counted at full width"
    if facts.experts is False:
        yield f"{dense}: the model has no experts"
        yield f"{latent}: the model has no experts"
        return
    if facts.total_parameters is None or facts.active_parameters is None:
        yield f"{dense}: needs total_parameters and active_parameters"
    else:
        share = facts.total_parameters / facts.active_parameters
        yield Mistake(
            dense,
            share,
            share,
            f"all parameters / active ones: {facts.total_parameters:.4g} / {facts.active_parameters:.4g}",
            "does the count take the experts a token is sent to, and not all of them?",
        )
    yield Mistake(
        latent,
        LATENT_EXPERTS,
        LATENT_EXPERTS,
        "a 16B model of the paper that routes 512 of 2048 features, 54.27 / 25.58; others give other numbers",
        "are the expert products counted at the width after the projection?",
    )


def _causal(facts: JobFacts) -> Mistake | str:
    name, check = "causal attention not halved", "does the count halve attention for the causal mask?"
    if facts.counts_causal_half:
        return f"{name}: the count halves it"
    width, length = facts.width, facts.sequence_length
    if width is None or length is None:
        return Mistake(
            name, 1.06, 1.5, "7B at 4k tokens to 8B at 128k: (6 N + 12 L d S) / (6 N + 7 L d S)", check
        )
    known = facts.matmul_parameters is not None and facts.n_layers is not None
    weights = (facts.matmul_parameters or 0) / (facts.n_layers or 1) if known else 12.0 * width**2
    share = (6 * weights + 12 * width * length) / (6 * weights + 7 * width * length)
    per_layer = f"N/L = {weights:.4g}" + ("" if known else " (12 d^2)")
    why = f"(6 N + 12 L d S) / (6 N + 7 L d S) with {per_layer}, d = {width}, S = {length}"
    return Mistake(name, share, share, why, check)


def _peak(facts: JobFacts) -> Iterator[Mistake | str]:
    yield Mistake(
        "sparse peak used",
        0.5,
        0.5,
        "the peak with structured sparsity is twice the dense one: 1/2",
        "is the peak the dense one of the data sheet (H100 SXM, BF16: 989 TFLOP/s)?",
    )
    check = "in which type do the matrix products run, and of which type is the peak?"
    run, peak = facts.compute_dtype, facts.peak_dtype
    if run is not None and peak is not None:
        share = RATES[run] / RATES[peak]
        name = f"{run} work held against the {peak} peak"
        yield (
            f"peak of the wrong type: work and peak are {run} and {peak}, which have the same"
            if share == 1
            else Mistake(name, share, share, f"peak of {run} / peak of {peak}", check)
        )
        return
    yield Mistake(
        "peak of a slower type", 2.0, 2.0, "such as fp8 work held against the bf16 peak: 2/1", check
    )
    yield Mistake(
        "peak of a faster type", 0.5, 0.5, "such as bf16 work held against the fp8 peak: 1/2", check
    )


def _counters(facts: JobFacts) -> Iterator[Mistake]:
    clocks = facts.boost_mhz / facts.tensor_mhz
    yield Mistake(
        "OFU taken with the boost clock",
        clocks,
        clocks,
        f"OFU is low by {1 - 1 / clocks:.1%} when {facts.boost_mhz:g} MHz stands for {facts.tensor_mhz:g}: "
        f"{facts.boost_mhz:g} / {facts.tensor_mhz:g}",
        "is the tensor clock that of the tensor-core peak, and not the boost limit?",
        in_ofu=True,
    )
    known = facts.tile_overhead
    low, high = (1 / 1.09, 1 / 1.02) if known is None else (1 / (1 + known), 1 / (1 + known))
    yield Mistake(
        "whole tiles in OFU",
        low,
        high,
        "tensor cores compute whole tiles, 2 to 9 % more as a rule: 1 / (1 + overhead)",
        "perf-metrics trace FILE gives the overhead of the job's kernels",
        in_ofu=True,
    )
