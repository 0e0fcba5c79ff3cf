"""Peaks of several types and devices, and time without the compiler's."""

from __future__ import annotations

import time

import pytest
import torch

from perf_metrics import (
    ThroughputMeter,
    device_peak_flops,
    exclude_compilation,
    measure_peak_flops,
    mixed_peak_flops,
    model_flops_utilization,
    sum_peaks,
)


def test_types_take_their_turns() -> None:
    # 8 of 10 FLOPs at 2 a second, 2 at 1 a second: 6 seconds for 10.
    assert mixed_peak_flops({"fp8": 0.8, "bf16": 0.2}, {"fp8": 2.0, "bf16": 1.0}) == pytest.approx(10 / 6)
    assert mixed_peak_flops({"bf16": 1.0}, {"bf16": 989e12}) == pytest.approx(989e12)
    assert mixed_peak_flops({"bf16": 1.0, "fp8": 0.0}, {"bf16": 3.0, "fp8": None}) == pytest.approx(3.0)
    assert mixed_peak_flops({"bf16": 0.5, "fp4": 0.5}, {"bf16": 3.0, "fp4": None}) is None


@pytest.mark.parametrize("shares", [{"bf16": 0.5}, {"bf16": 1.2, "fp8": -0.2}, {}])
def test_shares_are_of_a_whole(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be 0 or more each, and 1 together"):
        mixed_peak_flops(shares, {"bf16": 1.0, "fp8": 2.0})


def test_a_peak_must_be_one() -> None:
    with pytest.raises(ValueError, match=r"peaks\['bf16'\]=-1"):
        mixed_peak_flops({"bf16": 1.0}, {"bf16": -1})


def test_unlike_devices_add_up_and_an_unknown_one_is_not_guessed() -> None:
    assert sum_peaks([989e12, 312e12]) == 1301e12
    assert sum_peaks([989e12, None]) is None
    assert sum_peaks([]) is None


def test_a_given_peak_goes_before_the_types() -> None:
    assert device_peak_flops({"fp8": 0.5, "bf16": 0.5}, value="2e12") == 2e12


def test_the_share_is_not_clamped() -> None:
    assert model_flops_utilization(3.0, 1.0, 2.0) == 1.5
    assert model_flops_utilization(3.0, 1.0, None) is None
    assert model_flops_utilization(3.0, 0.0, 2.0) is None


def test_compilation_and_recompilation_are_left_out() -> None:
    def slow(graph: torch.fx.GraphModule, _: object) -> object:
        time.sleep(0.2)
        return graph.forward

    compiled = torch.compile(lambda x: x * 2, backend=slow, dynamic=False)
    meter = ThroughputMeter()
    with exclude_compilation(meter):
        for size in (3, 3, 4):
            compiled(torch.ones(size))
        inside = meter.lap()
    assert inside.phases["compile"] >= 0.4
    assert inside.gross_seconds - inside.net_seconds == pytest.approx(inside.phases["compile"])
    compiled(torch.ones(5))
    assert "compile" not in meter.lap().phases


def test_a_compilation_that_fails_closes_its_phase() -> None:
    def broken(graph: torch.fx.GraphModule, _: object) -> object:
        raise RuntimeError("no such backend")

    compiled = torch.compile(lambda x: x * 3, backend=broken)
    meter = ThroughputMeter()
    with exclude_compilation(meter), pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        compiled(torch.ones(3))
    meter.lap()
    time.sleep(0.01)
    assert meter.lap().phases == {}


def test_a_peak_is_measured_where_none_is_published() -> None:
    before = torch.get_rng_state()
    peak = device_peak_flops("fp32", value="measured")
    assert peak is not None
    assert 1e8 < peak < 1e14, "of this processor, however busy it is"
    shares = {"fp32": 0.5, "fp64": 0.5}
    mixed = device_peak_flops(shares, value="measured")
    assert mixed is not None
    assert 1e8 < mixed < 1e14
    assert torch.equal(torch.get_rng_state(), before), "a training run draws the same numbers"
    with pytest.raises(ValueError, match=r"dtype='fp8' cannot be measured\. Use one of bf16, fp16"):
        device_peak_flops("fp8", value="measured")
    with pytest.raises(ValueError, match=r"seconds=0 must be above 0"):
        measure_peak_flops(seconds=0)
