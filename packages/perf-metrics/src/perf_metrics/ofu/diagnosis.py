"""Why MFU and OFU of a job differ: candidates with their arithmetic, not verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..display import text_table
from ..utilization import mixed_peak_flops
from .process_checks import Finding
from .samples import tensor_clock

if TYPE_CHECKING:
    from hardware_table import Accelerator

RATES = {"fp4": 4.0, "fp8": 2.0, "bf16": 1.0, "fp16": 1.0, "tf32": 0.5}
"""Dense tensor peaks relative to BF16 where the device is unknown: of an H100, and for FP4 of a B200."""
_OTHER_FP4 = 6.0
"""FP4 of a B300 relative to BF16 (hardware-table: 13.5 / 2.25 PFLOP/s)."""
MIXED = "mixed"
"""As `JobFacts.peak_dtype`: MFU is compared with the effective peak of `compute_shares`."""


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
        device: Name of the GPU, as torch or DCGM's label `modelName` gives it. Peaks and clocks are then its
            own, from hardware-table; without it peaks are relative to BF16, as on an H100, and FP4 is that of
            a B200 or a B300.
        compute_dtype: Type that the matrix products run in: fp4, fp8, bf16, fp16 or tf32.
        compute_shares: In its place, where they run in several types: the share of the FLOPs of each, such as
            `{"fp8": 0.7, "bf16": 0.3}`; together 1. Their effective peak is that of `mixed_peak_flops`.
        peak_dtype: Type whose peak MFU is compared with; "mixed" for the effective peak of `compute_shares`.
        tile_overhead: Work that tiles add to the shapes, as a share; about 0.02 to 0.09 when unknown.
        tensor_mhz: Clock in MHz of the tensor peak; None: that of `device`, or 1830 of an H100 SXM.
        boost_mhz: Boost limit of the SMs in MHz, which may have been taken in its place; None: that of
            `device`, or 1980 of an H100 SXM.
        usual_ofu: OFU of the same job in good times.
        findings: What `check_process` found in the job.

    Raises:
        ValueError: A fact is not of its kind, hardware-table does not know the device, or the shares are of
            an unknown type or do not add up to 1.
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
    device: str | None = None
    compute_dtype: str | None = None
    compute_shares: Mapping[str, float] | None = None
    peak_dtype: str | None = None
    tile_overhead: float | None = None
    tensor_mhz: float | None = None
    boost_mhz: float | None = None
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
        if self.compute_dtype not in (None, *RATES):
            raise ValueError(
                f"compute_dtype={self.compute_dtype!r} must be one of {', '.join(RATES)}, or None."
            )
        if self.peak_dtype not in (None, MIXED, *RATES):
            raise ValueError(
                f"peak_dtype={self.peak_dtype!r} must be one of {', '.join(RATES)} or {MIXED}, or None."
            )
        self._check_shares()
        if self.device is not None and _record(self.device) is None:
            raise ValueError(
                f"device={self.device!r} has no single record in hardware-table. Give the name that torch or "
                "DCGM gives it, such as 'NVIDIA B200', or None."
            )
        if self.tile_overhead is not None and not 0 <= self.tile_overhead < math.inf:
            raise ValueError(f"tile_overhead={self.tile_overhead!r} must be a share of 0 or more.")

    @property
    def work(self) -> Mapping[str, float] | None:
        """Share of the FLOPs by type; None when it is unknown."""
        return self.compute_shares if self.compute_dtype is None else {self.compute_dtype: 1.0}

    def _check_shares(self) -> None:
        shares = self.compute_shares
        if shares is None:
            if self.peak_dtype == MIXED:
                raise ValueError(f"peak_dtype={MIXED!r} needs compute_shares, such as fp8:0.7 bf16:0.3.")
            return
        if self.compute_dtype is not None:
            raise ValueError(
                f"compute_dtype={self.compute_dtype!r} and compute_shares={dict(shares)!r} exclude each "
                "other. Give one of them."
            )
        strange = [str(name) for name in shares if name not in RATES]
        if strange:
            raise ValueError(
                f"compute_shares has the unknown type {', '.join(strange)}. Use {', '.join(RATES)}."
            )
        numbers = all(
            isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
            for share in shares.values()
        )
        if not numbers or not math.isclose(sum(shares.values()), 1.0):
            raise ValueError(
                f"compute_shares={dict(shares)!r} must be shares from 0 to 1 that add up to 1, such as "
                "fp8:0.7 bf16:0.3."
            )


def _record(device: str) -> Accelerator | None:
    # Imported here: without a device no table is needed.
    from hardware_table import lookup

    return lookup(device)


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
    work, base = facts.work, facts.peak_dtype
    if work is not None and base == MIXED:
        yield f"{_WRONG_PEAK}: MFU is compared with the effective peak of {_work_text(work)}"
    elif work is not None and base is not None:
        yield _work_against(work, base, facts)
    elif work is None and base is None and facts.device is None:
        slower, faster = (
            "such as fp8 work against the bf16 peak: 2/1",
            "such as bf16 work against the fp8 peak: 1/2",
        )
        yield MfuGapCause.of("peak of a slower type", 2.0, slower, _WHICH_TYPE)
        yield MfuGapCause.of("peak of a faster type", 0.5, faster, _WHICH_TYPE)
        yield _work_against({"fp4": 1.0}, "bf16", facts)
    else:
        yield from _all_peaks(work, base, facts)


_WRONG_PEAK = "peak of the wrong type"
_WHICH_TYPE = "in which type do the matrix products run, and of which type is the peak?"


def _all_peaks(work: Mapping[str, float] | None, base: str | None, facts: JobFacts) -> Iterator[MfuGapCause]:
    """Yield what each type that is not known would give, every ratio once."""
    ratios: set[tuple[float, float]] = set()
    for run in [work] if work is not None else [{name: 1.0} for name in RATES]:
        for peak in [base] if base is not None else RATES:
            cause = _work_against(run, peak, facts)
            # BF16 and FP16 have the same peak, and a device lacks some types.
            if isinstance(cause, MfuGapCause) and (cause.low, cause.high) not in ratios:
                ratios.add((cause.low, cause.high))
                yield cause


def _work_against(work: Mapping[str, float], base: str, facts: JobFacts) -> MfuGapCause | str:
    """Return MFU/OFU where the work of these types is held against the peak of one."""
    tables = _peak_tables(facts.device)
    lacking = [name for name in (*work, base) if tables[0][name] is None]
    if lacking:
        return f"{_WRONG_PEAK}: hardware-table has no {lacking[0]} peak of {facts.device}"
    # Rounded, so that types with the same peak have the ratio 1.
    ratios = sorted({round(_peak_of(work, table) / _peak_of({base: 1.0}, table), 12) for table in tables})
    what = _work_text(work)
    if ratios == [1.0]:
        return f"{_WRONG_PEAK}: work and peak are {what} and {base}, which have the same"
    mixed = len(work) > 1
    why = f"{'effective ' if mixed else ''}peak of {what} / peak of {base}"
    if mixed or facts.device is not None:
        why += ": " + " or ".join(
            _peaks_text(work, base, table, facts.device) for table in tables[: len(ratios)]
        )
    elif len(ratios) > 1:
        why += ", of a B200 to a B300"
    return MfuGapCause(f"{what} work against the {base} peak", ratios[0], ratios[-1], why, _WHICH_TYPE)


def _peak_tables(device: str | None) -> list[dict[str, float | None]]:
    """Return peaks by type: of the device in FLOP/s, or in units of the BF16 peak where they may differ."""
    if device is None:
        return [{**RATES}, {**RATES, "fp4": _OTHER_FP4}]
    record = _record(device)
    return [{name: None if record is None else record.peak_flops(name) for name in RATES}]


def _peak_of(work: Mapping[str, float], table: Mapping[str, float | None]) -> float:
    peak = mixed_peak_flops(work, table)
    assert peak is not None  # the caller has looked whether the table has these types
    return peak


def _work_text(work: Mapping[str, float]) -> str:
    return " and ".join(work) if len(work) == 1 else ", ".join(f"{s:.4g} {name}" for name, s in work.items())


def _peaks_text(
    work: Mapping[str, float], base: str, table: Mapping[str, float | None], device: str | None
) -> str:
    scale, unit = (1.0, "of the bf16 peak") if device is None else (1e12, f"TFLOP/s of {device}")
    peak, of = (_peak_of(types, table) / scale for types in (work, {base: 1.0}))
    terms = " + ".join(
        f"{share:.4g} / {_peak_of({name: 1.0}, table) / scale:.6g}" for name, share in work.items()
    )
    effective = f"1 / ({terms}) = {peak:.5g}" if len(work) > 1 else f"{peak:.6g}"
    return f"{effective} / {of:.6g} {unit}"


def _counters(facts: JobFacts) -> Iterator[MfuGapCause | str]:
    yield _boost_clock(facts)
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


def _boost_clock(facts: JobFacts) -> MfuGapCause | str:
    name = "OFU taken with the boost clock"
    tensor, boost = facts.tensor_mhz, facts.boost_mhz
    if facts.device is None:
        tensor, boost = tensor or 1830.0, boost or 1980.0
    else:
        record = _record(facts.device)
        tensor = tensor or tensor_clock(facts.device).mhz
        if boost is None and record is not None:
            # The record has a boost clock where it is not that of the peaks.
            known = record.boost_ghz or (record.clock_ghz if record.clock_kind == "boost" else None)
            boost = None if known is None else 1000 * known
    if tensor is None or boost is None:
        return f"{name}: hardware-table has not both clocks of {facts.device}; give tensor_mhz and boost_mhz"
    if tensor == boost:
        return f"{name}: the tensor peak is at the boost clock, {boost:g} MHz"
    clocks = boost / tensor
    return MfuGapCause.of(
        name,
        clocks,
        f"OFU is low by {1 - 1 / clocks:.1%} when {boost:g} MHz stands for {tensor:g}: "
        f"{boost:g} / {tensor:g}",
        "is the tensor clock that of the tensor-core peak, and not the boost limit?",
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
