import pytest
from torch import distributed

from perf_metrics.ofu.diagnosis import Candidate, JobFacts, diagnose
from perf_metrics.ofu.process_checks import check_process


def named(mfu: float, ofu: float, name: str, facts: JobFacts | None = None) -> Candidate:
    return next(one for one in diagnose(mfu, ofu, facts).candidates if one.name == name)


def first(mfu: float, ofu: float, facts: JobFacts | None = None) -> str:
    return diagnose(mfu, ofu, facts).candidates[0].name


def fitting(mfu: float, ofu: float, facts: JobFacts | None = None) -> list[str]:
    return [one.name for one in diagnose(mfu, ofu, facts).candidates if one.fits]


# "What divergence revealed" in "Instant GPU Efficiency Visibility at Fleet Scale": four cases. The signatures
# of the first two are those cases' own figures, as the paper has no formula for them.


def test_case_1_latent_experts() -> None:
    diagnosis = diagnose(0.5427, 0.2558)
    best = diagnosis.candidates[0]
    assert best.name == "latent experts counted at full width"
    assert (round(diagnosis.ratio, 2), round(best.expected[0], 2)) == (2.12, 2.12)
    assert best.fits
    # A peak of half the size would give 2, which is 6 % off.
    assert diagnosis.candidates[1].name == "peak of a slower type"
    assert 0.05 < diagnosis.candidates[1].distance < 0.07
    assert "experts counted as dense: needs total_parameters and active_parameters" in diagnosis.not_judged


def test_case_2_hybrid() -> None:
    assert fitting(0.2451, 0.1556) == ["hybrid counted as attention and MLP", "causal attention not halved"]
    # Its right count, 17.8 to 18.0 % against 18.5 to 18.7 %.
    assert first(0.179, 0.186) == "MFU and OFU agree"


def test_case_3_recomputation() -> None:
    best = diagnose(0.26, 0.34).candidates[0]
    assert best.name == "recomputation not counted"
    assert best.arithmetic == (
        "MFU counts 3 passes where full recomputation runs 4: 3/4 = 0.750; MFU/OFU = 26.0% / 34.0% = 0.765, "
        "2.0% off; put right, MFU would be 34.7%"
    )
    assert first(0.33, 0.34) == "MFU and OFU agree"


def test_case_4_a_forgotten_debug_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper has no percentages here: the count is right, and both figures are low."""
    before = distributed.get_debug_level()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    distributed.set_debug_level_from_env()
    try:
        found = [one for one in check_process() if one.setting == "TORCH_DISTRIBUTED_DEBUG"]
    finally:
        distributed.set_debug_level(before)
    best = diagnose(0.09, 0.092, JobFacts(findings=found)).candidates[0]
    assert best.name == "slowed by TORCH_DISTRIBUTED_DEBUG"
    assert "gloo" in best.check
    # Without access to the process, the job's own past says as much as can be known.
    best = diagnose(0.09, 0.092, JobFacts(usual_ofu=0.4)).candidates[0]
    assert best.name == "tensor cores wait"
    assert "OFU was 40.0%" in best.arithmetic
    assert best.check == "if both are low: check_process() in the job, then a profiler trace"
    assert first(0.09, 0.092, JobFacts(usual_ofu=0.093)) == "MFU and OFU agree"


@pytest.mark.parametrize(
    ("mfu", "ofu", "facts", "name"),
    [
        (0.20, 0.40, JobFacts(), "sparse peak used"),
        (0.20, 0.40, JobFacts(), "peak of a faster type"),
        (0.80, 0.40, JobFacts(), "peak of a slower type"),
        (
            0.80,
            0.40,
            JobFacts(compute_dtype="fp8", peak_dtype="bf16"),
            "fp8 work against the bf16 peak",
        ),
        (
            0.10,
            0.40,
            JobFacts(compute_dtype="tf32", peak_dtype="fp8"),
            "tf32 work against the fp8 peak",
        ),
        # Of 671B parameters 37B are active.
        (3.6, 0.2, JobFacts(total_parameters=671e9, active_parameters=37e9), "experts counted as dense"),
        (0.44, 0.40, JobFacts(), "causal attention not halved"),
        (0.4328, 0.40, JobFacts(), "OFU taken with the boost clock"),
        (0.38, 0.40, JobFacts(), "whole tiles in OFU"),
    ],
)
def test_signatures_fit_their_cause(mfu: float, ofu: float, facts: JobFacts, name: str) -> None:
    assert name in fitting(mfu, ofu, facts)


def test_the_boost_clock_makes_ofu_low() -> None:
    boost = named(0.4, 0.4 * 1830 / 1980, "OFU taken with the boost clock")
    assert boost.distance == pytest.approx(0, abs=1e-12)
    assert boost.arithmetic == (
        "OFU is low by 7.6% when 1980 MHz stands for 1830: 1980 / 1830 = 1.082; MFU/OFU = 40.0% / 37.0% = "
        "1.082, 0.0% off; put right, OFU would be 40.0%"
    )
    # The range of the causal mask holds it too. A single number that fits says more than a range.
    assert fitting(0.4, 0.4 * 1830 / 1980)[0] == "OFU taken with the boost clock"


@pytest.mark.parametrize(
    ("weights", "length", "executed_share"),
    [(6.607e9, 4096, 0.94), (7.504e9, 8192, 0.91), (7.504e9, 131072, 0.66)],
)
def test_causal_attention_by_the_shape(weights: float, length: int, executed_share: float) -> None:
    """Llama 7B and 8B: executed over PaLM's count is 0.94 at 4k tokens, 0.91 at 8k and 0.66 at 128k."""
    shape = {"sequence_length": length, "width": 4096}
    exact = named(
        0.5, 0.4, "causal attention not halved", JobFacts(**shape, n_layers=32, matmul_parameters=weights)
    )
    assert exact.expected[0] == exact.expected[1]
    assert 1 / exact.expected[0] == pytest.approx(executed_share, abs=0.005)
    by_width = named(0.5, 0.4, "causal attention not halved", JobFacts(**shape))
    assert 1 / by_width.expected[0] == pytest.approx(executed_share, abs=0.015)
    assert "(12 d^2)" in by_width.arithmetic


def test_facts_rule_candidates_out() -> None:
    facts = JobFacts(
        recomputes=False,
        experts=False,
        hybrid=False,
        counts_causal_half=True,
        compute_dtype="bf16",
        peak_dtype="fp16",
    )
    diagnosis = diagnose(0.26, 0.34, facts)
    assert diagnosis.not_judged == (
        "recomputation not counted: the job recomputes nothing",
        "hybrid counted as attention and MLP: the layers are all of one kind",
        "experts counted as dense: the model has no experts",
        "latent experts counted at full width: the model has no experts",
        "causal attention not halved: the count halves it",
        "peak of the wrong type: work and peak are bf16 and fp16, which have the same",
    )
    assert [one.name for one in diagnosis.candidates] == [
        "whole tiles in OFU",
        "MFU and OFU agree",
        "OFU taken with the boost clock",
        "sparse peak used",
    ]
    assert not any(one.fits for one in diagnosis.candidates)


def test_known_tile_overhead_is_a_number() -> None:
    tiles = named(0.4, 0.4132, "whole tiles in OFU", JobFacts(tile_overhead=0.033))
    assert tiles.distance == pytest.approx(0, abs=1e-3)
    assert tiles.expected == (1 / 1.033, 1 / 1.033)


def test_candidates_are_in_order() -> None:
    for ratio in (0.3, 0.5, 0.77, 0.96, 1.0, 1.2, 1.58, 2.1, 5.0):
        ranks = [
            (not one.fits, one.fits and one.expected[0] != one.expected[1], one.distance)
            for one in diagnose(0.2 * ratio, 0.2).candidates
        ]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("mfu", "ofu", "message"),
    [
        (42.0, 0.4, r"mfu=42\.0 must be a share above 0, such as 0\.42 for 42 %"),
        (0.4, 38.0, r"ofu=38\.0 must be a share"),
        (0.4, 0.0, r"ofu=0\.0 must be a share"),
        (float("nan"), 0.4, "mfu=nan"),
    ],
)
def test_shares_that_are_none(mfu: float, ofu: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        diagnose(mfu, ofu)


def test_facts_that_are_none() -> None:
    with pytest.raises(ValueError, match="compute_dtype='int4' must be one of fp4, fp8, bf16, fp16, tf32"):
        JobFacts(compute_dtype="int4")
    with pytest.raises(ValueError, match="active_parameters=0 must be a positive number"):
        JobFacts(active_parameters=0)
    with pytest.raises(ValueError, match=r"tile_overhead=-0\.1"):
        JobFacts(tile_overhead=-0.1)


def test_the_table() -> None:
    header, best, *rest = str(diagnose(0.26, 0.34)).splitlines()
    assert header.split() == ["MFU/OFU", "=", "0.765;", "candidate", "expected", "off"]
    assert best.split() == ["recomputation", "not", "counted", "0.750", "2.0%"]
    assert rest[-1] == "left out: experts counted as dense: needs total_parameters and active_parameters"


B200, B300 = "NVIDIA B200", "NVIDIA B300 SXM6 AC"


@pytest.mark.parametrize(
    ("device", "peak_dtype", "ratio", "peaks"),
    [
        # hardware-table: FP4 9 and 13.5, FP8 4.5, BF16 2.25 PFLOP/s.
        (B200, "bf16", 4.0, "9000 / 2250 TFLOP/s of NVIDIA B200"),
        (B300, "bf16", 6.0, "13500 / 2250 TFLOP/s of NVIDIA B300 SXM6 AC"),
        (B200, "fp8", 2.0, "9000 / 4500"),
        (B300, "fp8", 3.0, "13500 / 4500"),
        (B300, "tf32", 12.0, "13500 / 1125"),
    ],
)
def test_fp4_by_the_peaks_of_the_device(device: str, peak_dtype: str, ratio: float, peaks: str) -> None:
    facts = JobFacts(device=device, compute_dtype="fp4", peak_dtype=peak_dtype)
    best = diagnose(0.2 * ratio, 0.2, facts).candidates[0]
    assert (best.name, best.expected) == (f"fp4 work against the {peak_dtype} peak", (ratio, ratio))
    assert f"peak of fp4 / peak of {peak_dtype}: {peaks}" in best.arithmetic


def test_fp4_without_a_device_is_that_of_one_of_two() -> None:
    for facts in (JobFacts(), JobFacts(compute_dtype="fp4", peak_dtype="bf16")):
        for ratio in (4, 6):
            best = diagnose(0.1 * ratio, 0.1, facts).candidates[0]
            assert (best.name, best.expected) == ("fp4 work against the bf16 peak", (4, 6))
            assert "of a B200 to a B300" in best.arithmetic
    # Work below the peak of FP4, the other way around.
    assert named(0.1, 0.5, "bf16 work against the fp4 peak", JobFacts(peak_dtype="fp4")).expected == (
        pytest.approx(1 / 6),
        1 / 4,
    )


def test_one_known_type_is_held_against_all_others() -> None:
    facts = JobFacts(device=B300, compute_dtype="fp4")
    against = [one for one in diagnose(0.3, 0.1, facts).candidates if " work against the " in one.name]
    assert {one.name.split()[-2]: one.expected[0] for one in against} == {"fp8": 3, "bf16": 6, "tf32": 12}
    assert against[0].name == "fp4 work against the fp8 peak"
    # What the device does not have is not held against anything.
    hopper = diagnose(0.4, 0.1, JobFacts(device="NVIDIA H100 80GB HBM3", compute_dtype="bf16"))
    assert not [one.name for one in hopper.candidates if "fp4" in one.name]


def test_a_type_that_the_device_lacks_is_not_judged() -> None:
    facts = JobFacts(device="NVIDIA A100-SXM4-80GB", compute_dtype="fp8", peak_dtype="bf16")
    diagnosis = diagnose(0.4, 0.2, facts)
    reason = "peak of the wrong type: hardware-table has no fp8 peak of NVIDIA A100-SXM4-80GB"
    assert reason in diagnosis.not_judged
    assert (
        "OFU taken with the boost clock: the tensor peak is at the boost clock, 1410 MHz"
        in diagnosis.not_judged
    )


def test_the_clocks_of_the_device() -> None:
    boost = named(0.4, 0.4, "OFU taken with the boost clock", JobFacts(device=B200))
    assert boost.expected[0] == pytest.approx(1965 / 1856)
    own = named(0.4, 0.4, "OFU taken with the boost clock", JobFacts(device=B200, boost_mhz=1900))
    assert own.expected[0] == pytest.approx(1900 / 1856)


def test_mixed_precision_has_an_effective_peak() -> None:
    """1 / (0.7 / 4500 + 0.3 / 2250) = 3461.5 TFLOP/s: "Mixed precision" of the publication."""
    shares = {"fp8": 0.7, "bf16": 0.3}
    effective = 1 / (0.7 / 4.5e15 + 0.3 / 2.25e15)
    # F FLOPs in 1 s, counted against BF16; the tensor cores work F / effective of that second.
    flops = 0.4 * effective
    facts = JobFacts(device=B200, compute_shares=shares, peak_dtype="bf16")
    best = diagnose(flops / 2.25e15, 0.4, facts).candidates[0]
    assert best.name == "0.7 fp8, 0.3 bf16 work against the bf16 peak"
    assert best.distance == pytest.approx(0, abs=1e-12)
    assert (
        "effective peak of 0.7 fp8, 0.3 bf16 / peak of bf16: 1 / (0.7 / 4500 + 0.3 / 2250) = 3461.5 / 2250 "
        "TFLOP/s of NVIDIA B200 = 1.538"
    ) in best.arithmetic
    assert "put right, MFU would be 40.0%" in best.arithmetic
    # Relative to BF16 it is the same without a device.
    general = diagnose(flops / 2.25e15, 0.4, JobFacts(compute_shares=shares, peak_dtype="bf16")).candidates[0]
    assert general.expected[0] == pytest.approx(best.expected[0])
    assert "1 / (0.7 / 2 + 0.3 / 1) = 1.5385 / 1 of the bf16 peak" in general.arithmetic
    # MFU of the effective peak is right already.
    right = diagnose(0.4, 0.4, JobFacts(device=B200, compute_shares=shares, peak_dtype="mixed"))
    assert right.candidates[0].name == "MFU and OFU agree"
    reason = "peak of the wrong type: MFU is compared with the effective peak of 0.7 fp8, 0.3 bf16"
    assert reason in right.not_judged


def test_mixed_precision_with_fp4_without_a_device_is_a_range() -> None:
    facts = JobFacts(compute_shares={"fp4": 0.5, "bf16": 0.5}, peak_dtype="bf16")
    mixed = named(0.3, 0.2, "0.5 fp4, 0.5 bf16 work against the bf16 peak", facts)
    assert mixed.expected == (pytest.approx(1 / (0.5 / 4 + 0.5)), pytest.approx(1 / (0.5 / 6 + 0.5)))
    assert " or 1 / (0.5 / 6 + 0.5 / 1)" in mixed.arithmetic


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"compute_shares": {"fp8": 0.7, "bf16": 0.2}}, "shares from 0 to 1 that add up to 1"),
        ({"compute_shares": {"fp8": 1.5, "bf16": -0.5}}, "shares from 0 to 1 that add up to 1"),
        ({"compute_shares": {}}, "that add up to 1"),
        ({"compute_shares": {"int3": 1.0}}, "unknown type int3. Use fp4, fp8, bf16, fp16, tf32"),
        ({"compute_shares": {"fp8": 1.0}, "compute_dtype": "fp8"}, "exclude each other"),
        ({"peak_dtype": "mixed"}, "needs compute_shares"),
        ({"compute_dtype": "mixed"}, "compute_dtype='mixed' must be one of"),
        ({"device": "NVIDIA B100 XL"}, "device='NVIDIA B100 XL' has no single record"),
    ],
)
def test_shares_and_devices_that_are_none(facts: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JobFacts(**facts)
