"""Measured products against OFU: the arithmetic, the kernel from a trace, and a machine without a GPU.

The counters are read in `tests/device`, on a device in host memory with a scripted NVML.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hardware_table import lookup
from perf_metrics.commands.gemm import _measured_json, _measured_report
from perf_metrics.commands.main import main
from perf_metrics.ofu.calibration import GemmCalibration, TileWork, calibrate_gemm, tiles_of_trace
from perf_metrics.ofu.kernels import TileShape, tile_overhead
from perf_metrics.ofu.nvml import CycleCounts
from perf_metrics.ofu.sampler import DeviceWindow

H100 = "NVIDIA H100 80GB HBM3"
SMS, MHZ, TENSOR_MHZ, PER_CYCLE = 132, 1352.0, 1830.0, 4096
TILE = "nvjet_tst_256x160_64x4_2x1_v_bz_coopA_TNT"


def measured(activity: float = 0.9, *, overhead: float = 0.0322, counts: int = SMS) -> GemmCalibration:
    """A second of products of 4000^3 on an H100 whose tensor cores work that share of the cycles."""
    computed = SMS * MHZ * 1e6 * PER_CYCLE * activity  # FLOPs in a second, tiles included
    products = round(computed / (1 + overhead) / (2 * 4000**3))
    elapsed = MHZ * 1e6 * counts
    window = DeviceWindow(
        label="0",
        name=H100,
        uuid="GPU-0",
        ofu=activity * MHZ / TENSOR_MHZ,
        tensor_activity=activity,
        sm_mhz=MHZ,
        lowest_sm_mhz=1201,
        highest_sm_mhz=1558,
        tensor_mhz=TENSOR_MHZ,
        samples=5,
        seconds=1.0,
        cycles=CycleCounts(elapsed, elapsed, activity * elapsed),
        cycles_seconds=1.0,
        problem=None,
    )
    record = lookup(H100)
    assert record is not None
    return GemmCalibration(
        m=4000,
        n=4000,
        k=4000,
        dtype="bf16",
        device_name=H100,
        products=products,
        seconds=products * 2 * 4000**3 * (1 + overhead) / computed,
        peak_flops=record.peak_flops("bf16"),
        units=SMS,
        window=window,
        tiles=TileWork(TILE, overhead, None),
        problem=None,
    )


def test_adjusted_ofu_is_the_rate_over_the_peak() -> None:
    overhead = tile_overhead(TileShape(256, 160, 64, 2, 1), 4000, 4000, 4000)
    found = measured(overhead=overhead)
    rate = SMS * MHZ * 1e6 * PER_CYCLE * 0.9 / (1 + overhead)
    assert found.flops_per_second == pytest.approx(rate)
    assert found.share_of_peak == pytest.approx(rate / 989.4e12)
    assert found.flops_per_cycle == pytest.approx(PER_CYCLE * 0.9 / (1 + overhead))
    assert found.ofu == pytest.approx(0.9 * MHZ / TENSOR_MHZ)
    assert found.adjusted_ofu == pytest.approx((found.ofu or 0) / (1 + overhead))
    # 132 x 4096 x 1830 MHz is 989.43 TFLOP/s, which the table has rounded.
    assert found.difference_points == pytest.approx(0, abs=0.01)
    # Without the kernel's name the tiles stay in: 3.22 % of OFU are 2 points here.
    unknown = replace(found, tiles=TileWork(None, None, "why"))
    in_tiles = 100 * (found.ofu or 0) * overhead / (1 + overhead)
    assert unknown.difference_points == pytest.approx(in_tiles, abs=0.01)


@pytest.mark.parametrize(("counts", "ofu"), [(1, True), (SMS, True), (50, False)])
def test_the_scale_of_the_counters(counts: int, ofu: bool) -> None:
    found = measured(counts=counts)
    scale = found.cycle_scale
    assert scale is not None
    assert scale.measured == pytest.approx(counts)
    assert scale.counts_per_cycle == (counts if ofu else None)
    assert found.ofu_of_cycles == (pytest.approx(found.ofu) if ofu else None)
    # The SMs are those that the device reports, not those of the table: a slice has fewer.
    part = replace(found, units=50)
    assert part.cycle_scale is not None
    assert part.cycle_scale.counts_per_cycle == {1: 1, 50: 50}.get(counts)


def test_the_report() -> None:
    text = _measured_report(measured())
    assert text.splitlines() == [
        "[4,000, 4,000] x [4,000, 4,000] in bf16 on NVIDIA H100 80GB HBM3: 4,979 products in 1.00 s",
        "",
        "rate                        637.4 TFLOP/s",
        "peak                        989.4 TFLOP/s",
        "rate / peak                 64.42%",
        "SM clock                    1,352 MHz, 1,201 to 1,558; tensor peak at 1,830 MHz",
        "FLOPs per SM and cycle      3,571, at the peak 4,096",
        "tensor activity             90.00%",
        "OFU                         66.49%",
        f"tiles                       {TILE}: 3.22%",
        "adjusted OFU                64.42%",
        "adjusted OFU - rate / peak  -0.00 points",
        "cycle counters              132 counts in a cycle, taken as 132; tensor / elapsed 90.00%; "
        "OFU 66.49%",
    ]
    bound = replace(measured(), tiles=TileWork(TILE, 0.0322, "k is split, and each part may be rounded up"))
    assert ": 3.22%, lower bound: k is split, and each part may be rounded up\n" in _measured_report(bound)
    assert "apart" not in text
    slow = replace(measured(), seconds=1.1)
    assert _measured_report(slow).splitlines()[-1].startswith("more than 2 points apart: does somebody else")
    blind = replace(slow, tiles=TileWork(None, None, "why"))
    assert "points apart: the tiles of the kernel are unknown; else does" in _measured_report(blind)
    answer = json.loads(json.dumps(_measured_json(measured())))
    assert answer["cycle_scale"]["counts_per_cycle"] == SMS
    assert answer["difference_points"] == pytest.approx(-0.005, abs=0.01)


def test_a_machine_without_a_gpu_has_the_rate_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert not torch.accelerator.is_available()
    precision, state = torch.get_float32_matmul_precision(), torch.get_rng_state()
    assert (
        main(["gemm", "64", "48", "32", "--measure", "--seconds", "0.05", "--dtype", "fp32", "--json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["seconds"] >= 0.05
    assert answer["flops_per_second"] == pytest.approx(
        2 * 64 * 48 * 32 * answer["products"] / answer["seconds"]
    )
    assert answer["problem"] == "measured on the CPU, not on a GPU: the rate only"
    for name in ("ofu", "adjusted_ofu", "peak_flops", "window", "cycle_scale", "difference_points"):
        assert answer[name] is None
    assert main(["gemm", "64", "48", "32", "--measure", "--seconds", "0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[64, 32] x [32, 48] in bf16 on cpu: ")
    assert (lines[3:5], lines[-1]) == (["peak         unknown", "rate / peak  n/a"], answer["problem"])
    # Nothing of the process has changed.
    assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 1, 1), {}, "m=0 must be 1 or more"),
        (
            (1, 1, 1),
            {"dtype": "fp8"},
            "dtype='fp8' cannot be measured by torch.mm. Use one of bf16, fp16, tf32",
        ),
        ((1, 1, 1), {"dtype": "tf32"}, "dtype='tf32' needs a GPU"),
        ((1, 1, 1), {"seconds": 0}, "seconds=0 must be a number above 0"),
        ((1, 1, 1), {"seconds": float("inf")}, "seconds=inf"),
        ((1, 1, 1), {"kernel": "nvjet_tst_TNN"}, "kernel='nvjet_tst_TNN' has no known tile"),
    ],
)
def test_what_cannot_be_measured(
    sizes: tuple[int, int, int], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate_gemm(*sizes, **options)


def trace(path: Path, *kernels: tuple[str, float, bool]) -> Path:
    """A trace with Kineto's structure: one product of [4000, 4000], and kernels that are joined or not."""
    shapes = [[4000, 4000], [4000, 4000]]
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 0, "tid": 1, "ts": 1, "dur": 2,
         "args": {"External id": 1, "Input Dims": shapes}}
    ]  # fmt: skip
    for name, microseconds, joined in kernels:
        events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 3, "dur": microseconds,
             "args": {"device": 0, "stream": 7} | ({"External id": 1} if joined else {})}
        )  # fmt: skip
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize(
    ("kernels", "name", "overhead", "reason"),
    [
        ([(TILE, 200.0, True)], TILE, 4096 * 4000 * 4032 / 4000**3 - 1, None),
        (
            [("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", 200.0, True)],
            "splitK",
            4032 * 4032 / 4000**2 - 1,
            "k is split",
        ),
        ([("sm75_new_gemm", 200.0, True)], "sm75_new_gemm", None, "no naming scheme"),
        ([("void elementwise_kernel<4>", 9.0, False)], None, None, "no kernel that multiplies matrices"),
        ([], None, None, "the profile of a product has no kernels of a GPU"),
    ],
)
def test_the_kernel_is_read_from_a_profile(
    tmp_path: Path,
    kernels: list[tuple[str, float, bool]],
    name: str | None,
    overhead: float | None,
    reason: str | None,
) -> None:
    tiles = tiles_of_trace(trace(tmp_path / "trace.json", *kernels))
    assert (tiles.kernel is None) == (name is None)
    assert (name or "") in (tiles.kernel or "")
    assert tiles.overhead == (None if overhead is None else pytest.approx(overhead))
    assert (tiles.inexact is None) == (reason is None)
    assert (reason or "") in (tiles.inexact or "")
