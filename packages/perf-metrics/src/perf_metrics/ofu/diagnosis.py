"""Why MFU and OFU of a job differ: candidates with their arithmetic, not verdicts."""

from __future__ import annotations

import math
import os
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from ..display import text_table


@dataclass(frozen=True)
class Finding:
    """A setting of this process that costs time.

    Attributes:
        setting: Name of the variable, function or argument.
        value: What it is set to.
        effect: What it does to the speed.
        fix: What to change.
    """

    setting: str
    value: str
    effect: str
    fix: str

    def __str__(self) -> str:
        return f"{self.setting}={self.value}: {self.effect}; {self.fix}"


def check_process(loader: object = None, *, device_type: str | None = None) -> list[Finding]:
    """Return the settings of this process that are known to slow training down.

    What a library reads from the environment when it is loaded is looked at as the environment is now. torch
    is asked only if it is loaded already. An empty list says that none of these settings is on, and no more.

    Args:
        loader: The data loader, to see whether it pins its memory. One without an attribute `pin_memory` is
            not judged.
        device_type: Where the batches go, such as "cuda"; by default what torch says, if it is loaded.

    Returns:
        Findings, those that cost most as a rule first.
    """
    torch = sys.modules.get("torch")
    return [
        *_distributed(torch),
        *_environment(),
        *_torch_modes(torch),
        *_profilers(torch),
        *_pageable_copies(loader, device_type or _accelerator(torch)),
    ]


def _distributed(torch: ModuleType | None) -> Iterator[Finding]:
    # In force is what torch read when it was loaded, or was told since; any case will do in the variable.
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper()
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available():
        level = str(distributed.get_debug_level().name)
    if level == "DETAIL":
        yield Finding(
            "TORCH_DISTRIBUTED_DEBUG",
            "DETAIL",
            "before each collective all ranks compare shapes through extra gloo collectives, and the tensor "
            "cores wait (divergence case 4 of the OFU paper)",
            "unset it, or use INFO",
        )


_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": (
        ("", "0"),
        "every kernel launch waits for the kernel, so that the device idles between kernels",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ("",),  # any value switches it on
        "every tensor is a cudaMalloc and a cudaFree, which wait for the device",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        ("", "0"),
        "the host waits for each collective before it launches more",
    ),
}
"""Variables, the values that leave them off, and what they do."""


def _environment() -> Iterator[Finding]:
    for name, (off, effect) in _SLOW_VARIABLES.items():
        if os.environ.get(name, "").strip() not in off:
            yield _variable(name, effect)
    level = os.environ.get("NCCL_DEBUG", "").upper()
    subsystems = os.environ.get("NCCL_DEBUG_SUBSYS", "").upper()
    if level == "TRACE":
        yield _variable("NCCL_DEBUG", "NCCL logs every call", "use WARN")
    elif level == "INFO" and {"COLL", "P2P", "CALL", "ALL"} & set(subsystems.split(",")):
        yield _variable("NCCL_DEBUG_SUBSYS", "with NCCL_DEBUG=INFO NCCL logs every call", "use INIT,ENV")


def _variable(name: str, effect: str, fix: str = "unset it") -> Finding:
    return Finding(name, os.environ[name], effect, fix)


def _torch_modes(torch: ModuleType | None) -> Iterator[Finding]:
    if torch is None:
        return
    if torch.is_anomaly_enabled():
        yield Finding(
            "torch.autograd.set_detect_anomaly",
            "True",
            "each operation keeps its stack, and each gradient is searched for NaN: the host waits for it",
            "leave detect_anomaly off but to look for a NaN",
        )
    if torch.are_deterministic_algorithms_enabled():
        workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        small = " (the workspace :16:8 may limit cuBLAS further)" if workspace == ":16:8" else ""
        yield Finding(
            "torch.use_deterministic_algorithms",
            "True",
            f"slower kernels are chosen, and memory is filled before it is used{small}",
            "torch.use_deterministic_algorithms(False); "
            "else torch.utils.deterministic.fill_uninitialized_memory = False",
        )
    elif torch.backends.cudnn.deterministic:
        yield Finding(
            "torch.backends.cudnn.deterministic",
            "True",
            "slower convolution kernels are chosen",
            "set it to False",
        )


def _profilers(torch: ModuleType | None) -> Iterator[Finding]:
    if torch is not None and torch.autograd.profiler._is_profiler_enabled:
        yield Finding(
            "torch.profiler", "active", "each operation is recorded", "end it, or profile a few steps"
        )
    for name, what in (("getprofile", "profile"), ("gettrace", "trace")):
        function = getattr(sys, name)()
        if function is not None:
            yield Finding(
                f"sys.set{what}",
                getattr(function, "__qualname__", type(function).__qualname__),
                "Python calls a function at each call or line; the host may launch kernels too late",
                "run without the Python profiler, debugger or coverage tool",
            )
    if tracemalloc.is_tracing():
        yield Finding(
            "tracemalloc",
            "tracing",
            "each Python allocation is recorded",
            "unset PYTHONTRACEMALLOC, or stop() it",
        )


def _accelerator(torch: ModuleType | None) -> str | None:
    if torch is None:
        return None
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else str(current.type)


def _pageable_copies(loader: object, device_type: str | None) -> Iterator[Finding]:
    # On "mps" memory is shared, and pinning means nothing.
    if loader is None or device_type in (None, "cpu", "mps"):
        return
    if getattr(loader, "pin_memory", None) is False:
        yield Finding(
            f"{type(loader).__qualname__}.pin_memory",
            "False",
            f"copies to {device_type} go through pageable memory, and the host waits for each of them",
            "pin_memory=True, and .to(device, non_blocking=True)",
        )


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
        peak_dtype: Type whose peak MFU is compared with.
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
        for name in (
            *("total_parameters", "active_parameters", "sequence_length", "width", "n_layers"),
            *("matmul_parameters", "tensor_mhz", "boost_mhz", "usual_ofu"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a positive number, or None when it is unknown.")
        for name in ("compute_dtype", "peak_dtype"):
            if getattr(self, name) not in (None, *RATES):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be one of {', '.join(RATES)}, or None."
                )
        if self.tile_overhead is not None and not 0 <= self.tile_overhead < math.inf:
            raise ValueError(f"tile_overhead={self.tile_overhead!r} must be a share of 0 or more.")


# What parts MFU from OFU, each cause with the ratio that it alone would give. Signatures: "Instant GPU
# Efficiency Visibility at Fleet Scale", and the FLOP counts of PaLM (6 N + 12 L d S per token) and of fused
# causal attention (6 N + 7 L d S).

FITS = 0.05
"""OFU is off by 1.9 points on average (H100, FP16, same paper): 5 % of an OFU of 0.38."""

LATENT_EXPERTS = 54.27 / 25.58
"""A 16B mixture of experts, activations projected from 2048 to 512 before routing: case 1 of the paper."""
HYBRID = 24.51 / 15.56
"""An 8B hybrid counted as if each layer were attention and a dense MLP: case 2 of the paper."""


@dataclass(frozen=True)
class MfuGapCause:
    """A cause and MFU/OFU with it, lowest and highest; `in_ofu` if it is OFU that it falsifies."""

    name: str
    low: float
    high: float
    why: str
    check: str
    in_ofu: bool = False

    @classmethod
    def of(cls, name: str, ratio: float, why: str, check: str, *, in_ofu: bool = False) -> MfuGapCause:
        """Return a cause that gives one number."""
        return cls(name, ratio, ratio, why, check, in_ofu)


def mfu_gap_causes(ofu: float, facts: JobFacts) -> Iterator[MfuGapCause | str]:
    """Yield each cause, or why it cannot be judged."""
    yield from _slow(ofu, facts)
    yield from _count(facts)
    yield from _experts(facts)
    yield _causal(facts)
    yield from _peak(facts)
    yield from _counters(facts)


def _slow(ofu: float, facts: JobFacts) -> Iterator[MfuGapCause]:
    for finding in facts.findings:
        yield MfuGapCause.of(
            f"slowed by {finding.setting}",
            1.0,
            f"the count is right and the tensor cores wait ({finding.setting}={finding.value}): 1",
            f"{finding.effect}; {finding.fix}",
        )
    fallen = facts.usual_ofu is not None and ofu < facts.usual_ofu * (1 - FITS)
    was = f", OFU was {facts.usual_ofu:.1%}" if fallen else ""
    yield MfuGapCause.of(
        "tensor cores wait" if fallen else "MFU and OFU agree",
        1.0,
        f"the count is right{was}: 1",
        "if both are low: check_process() in the job, then a profiler trace",
    )


def _count(facts: JobFacts) -> Iterator[MfuGapCause | str]:
    name = "recomputation not counted"
    yield (
        f"{name}: the job recomputes nothing"
        if facts.recomputes is False
        else MfuGapCause.of(
            name,
            0.75,
            "MFU counts 3 passes where full recomputation runs 4: 3/4",
            "is activation checkpointing on? MFU leaves it out by definition; compare HFU with OFU then",
        )
    )
    name = "hybrid counted as attention and MLP"
    yield (
        f"{name}: the layers are all of one kind"
        if facts.hybrid is False
        else MfuGapCause.of(
            name,
            HYBRID,
            "an 8B hybrid of the paper, 24.51 / 15.56; other models give other numbers",
            "count FLOPs per layer type",
        )
    )


def _experts(facts: JobFacts) -> Iterator[MfuGapCause | str]:
    dense, latent = "experts counted as dense", "latent experts counted at full width"
    if facts.experts is False:
        yield f"{dense}: the model has no experts"
        yield f"{latent}: the model has no experts"
        return
    if facts.total_parameters is None or facts.active_parameters is None:
        yield f"{dense}: needs total_parameters and active_parameters"
    else:
        yield MfuGapCause.of(
            dense,
            facts.total_parameters / facts.active_parameters,
            f"all parameters / active ones: {facts.total_parameters:.4g} / {facts.active_parameters:.4g}",
            "does the count take the experts a token is sent to, and not all of them?",
        )
    yield MfuGapCause.of(
        latent,
        LATENT_EXPERTS,
        "a 16B model of the paper that routes 512 of 2048 features, 54.27 / 25.58; others give other numbers",
        "are the expert products counted at the width after the projection?",
    )


def _causal(facts: JobFacts) -> MfuGapCause | str:
    name, check = "causal attention not halved", "does the count halve attention for the causal mask?"
    if facts.counts_causal_half:
        return f"{name}: the count halves it"
    width, length = facts.width, facts.sequence_length
    if width is None or length is None:
        return MfuGapCause(
            name, 1.06, 1.5, "7B at 4k tokens to 8B at 128k: (6 N + 12 L d S) / (6 N + 7 L d S)", check
        )
    known = facts.matmul_parameters is not None and facts.n_layers is not None
    weights = (facts.matmul_parameters or 0) / (facts.n_layers or 1) if known else 12.0 * width**2
    share = (6 * weights + 12 * width * length) / (6 * weights + 7 * width * length)
    per_layer = f"N/L = {weights:.4g}" + ("" if known else " (12 d^2)")
    why = f"(6 N + 12 L d S) / (6 N + 7 L d S) with {per_layer}, d = {width}, S = {length}"
    return MfuGapCause.of(name, share, why, check)


def _peak(facts: JobFacts) -> Iterator[MfuGapCause | str]:
    yield MfuGapCause.of(
        "sparse peak used",
        0.5,
        "the peak with structured sparsity is twice the dense one: 1/2",
        "is the peak the dense one of the data sheet (H100 SXM, BF16: 989 TFLOP/s)?",
    )
    check = "in which type do the matrix products run, and of which type is the peak?"
    run, peak = facts.compute_dtype, facts.peak_dtype
    if run is not None and peak is not None:
        share = RATES[run] / RATES[peak]
        name = f"{run} work against the {peak} peak"
        yield (
            f"peak of the wrong type: work and peak are {run} and {peak}, which have the same"
            if share == 1
            else MfuGapCause.of(name, share, f"peak of {run} / peak of {peak}", check)
        )
        return
    yield MfuGapCause.of("peak of a slower type", 2.0, "such as fp8 work against the bf16 peak: 2/1", check)
    yield MfuGapCause.of("peak of a faster type", 0.5, "such as bf16 work against the fp8 peak: 1/2", check)


def _counters(facts: JobFacts) -> Iterator[MfuGapCause]:
    clocks = facts.boost_mhz / facts.tensor_mhz
    yield MfuGapCause.of(
        "OFU taken with the boost clock",
        clocks,
        f"OFU is low by {1 - 1 / clocks:.1%} when {facts.boost_mhz:g} MHz stands for {facts.tensor_mhz:g}: "
        f"{facts.boost_mhz:g} / {facts.tensor_mhz:g}",
        "is the tensor clock that of the tensor-core peak, and not the boost limit?",
        in_ofu=True,
    )
    known = facts.tile_overhead
    low, high = (1 / 1.09, 1 / 1.02) if known is None else (1 / (1 + known), 1 / (1 + known))
    yield MfuGapCause(
        "whole tiles in OFU",
        low,
        high,
        "tensor cores compute whole tiles, 2 to 9 % more as a rule: 1 / (1 + overhead)",
        "perf-metrics trace FILE gives the overhead of the job's kernels",
        in_ofu=True,
    )


# MFU is what the application counted, over a peak that somebody chose; OFU is what the tensor cores did.
# Their ratio points at the cause.


@dataclass(frozen=True)
class Candidate:
    """A mistake that would explain the ratio.

    Attributes:
        name: What it is.
        expected: MFU/OFU that it alone would give, lowest and highest; the same where it is one number.
        distance: How far the ratio is from there, as |ln(ratio / expected)|: 0.05 is about 5 %.
        arithmetic: Where the number comes from, and what it would make of MFU.
        check: What to look at next.
    """

    name: str
    expected: tuple[float, float]
    distance: float
    arithmetic: str
    check: str

    @property
    def expected_text(self) -> str:
        """The expected MFU/OFU as text."""
        return _range(*self.expected)

    @property
    def fits(self) -> bool:
        """Whether it is within the error of OFU."""
        return self.distance <= FITS


@dataclass(frozen=True)
class Diagnosis:
    """Candidates, most likely first, and why others are not among them.

    Attributes:
        ratio: MFU / OFU.
        candidates: Those that fit first, of these a single number before a range; then by distance.
        not_judged: Mistakes that are ruled out, or need facts that are not given, with the reason.
    """

    ratio: float
    candidates: tuple[Candidate, ...]
    not_judged: tuple[str, ...]

    def __str__(self) -> str:
        """A table of the candidates, then what could not be judged."""
        rows = [(one.name, one.expected_text, f"{math.expm1(one.distance):.1%}") for one in self.candidates]
        table = text_table((f"MFU/OFU = {self.ratio:.3f}; candidate", "expected", "off"), rows)
        return "\n".join((table, *(f"left out: {reason}" for reason in self.not_judged)))


def diagnose(mfu: float, ofu: float, facts: JobFacts | None = None) -> Diagnosis:
    """Return what may explain the difference between MFU and OFU.

    Each candidate is compared with the ratio alone; two mistakes at once multiply, and may look like a third.

    Args:
        mfu: As the application reports it, as a share (0.42, not 42).
        ofu: As a share, over the same devices and time.
        facts: What is known of the job.

    Raises:
        ValueError: A share is not positive or is given in percent, or a fact is not of its kind.
    """
    for name, share, most in (("mfu", mfu, 10.0), ("ofu", ofu, 1.5)):
        if not 0 < share < most:
            raise ValueError(f"{name}={share!r} must be a share above 0, such as 0.42 for 42 %.")
    facts = facts or JobFacts()
    ratio = mfu / ofu
    causes = list(mfu_gap_causes(ofu, facts))
    judged = [_held_against(cause, mfu, ofu) for cause in causes if isinstance(cause, MfuGapCause)]
    judged.sort(key=lambda one: (not one.fits, one.fits and one.expected[0] != one.expected[1], one.distance))
    return Diagnosis(ratio, tuple(judged), tuple(cause for cause in causes if isinstance(cause, str)))


def _held_against(cause: MfuGapCause, mfu: float, ofu: float) -> Candidate:
    ratio = mfu / ofu
    low, high = cause.low, cause.high
    distance = abs(math.log(ratio / min(max(ratio, low), high)))
    arithmetic = (
        f"{cause.why} = {_range(low, high)}; MFU/OFU = {mfu:.1%} / {ofu:.1%} = {ratio:.3f}, "
        f"{math.expm1(distance):.1%} off"
    )
    if low == high != 1:
        right = f"OFU would be {ofu * low:.1%}" if cause.in_ofu else f"MFU would be {mfu / low:.1%}"
        arithmetic += f"; put right, {right}"
    return Candidate(cause.name, (low, high), distance, arithmetic, cause.check)


def _range(low: float, high: float) -> str:
    return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"
