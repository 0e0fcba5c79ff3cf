"""Effective sizes and overhead: the worked examples, and what holds for any sizes; the command."""

from __future__ import annotations

import json
import random

import pytest

from perf_metrics.commands import OneLineParser
from perf_metrics.commands.gemm import fill_gemm
from perf_metrics.ofu.kernels import (
    GemmKernel,
    TileShape,
    adjusted_ofu,
    effective_sizes,
    parse_kernel,
    tile_overhead,
)


def kernel(name: str) -> GemmKernel:
    found = parse_kernel(name)
    assert found is not None
    return found


# Kernels of a B200 trace in AMD-AGI/TraceLens, with the sizes in cuBLAS's terms, the blocks that the formula
# must give (which is the grid that was launched) and the overhead.
@pytest.mark.parametrize(
    ("name", "sizes", "blocks", "grid", "overhead"),
    [
        ("nvjet_tst_144x128_64x6_2x1_TNN", (2880, 888, 512), (20, 7), 140, "0.90%"),
        ("nvjet_tst_64x16_64x16_2x4_2cta", (128, 888, 2880), (2, 56), 112, "0.90%"),
        ("nvjet_tst_64x64_64x16_2x1_2cta", (640, 888, 2880), (10, 14), 140, "0.90%"),
        ("nvjet_tst_192x8_64x8_4x1", (25136, 1, 2880), (132, 1), 132, "707%"),
    ],
)
def test_launched_grids_of_a_public_trace(
    name: str, sizes: tuple[int, int, int], blocks: tuple[int, int], grid: int, overhead: str
) -> None:
    effective = effective_sizes(kernel(name), *sizes)
    assert (effective.blocks_m, effective.blocks_n) == blocks
    assert effective.blocks == grid
    assert effective.exact
    digits = 2 if "." in overhead else 0
    assert f"{tile_overhead(kernel(name), *sizes):.{digits}%}" == overhead


@pytest.mark.parametrize(
    ("size", "expected", "overhead"),
    [(4096, (4096, 4160, 4096), "1.56%"), (4000, (4096, 4000, 4032), "3.22%")],
)
def test_the_worked_example(size: int, expected: tuple[int, int, int], overhead: str) -> None:
    tile = kernel("nvjet_tst_256x160_64x4_2x1")
    effective = effective_sizes(tile, size, size, size)
    assert (effective.m, effective.n, effective.k) == expected
    assert f"{tile_overhead(tile, size, size, size):.2%}" == overhead
    assert effective.flops == 2 * expected[0] * expected[1] * expected[2]


def test_whole_clusters_are_the_least_that_covers_any_sizes() -> None:
    chance = random.Random(10)
    for _ in range(300):
        tile = TileShape(
            *(chance.choice((8, 16, 64, 96, 160)) for _ in range(3)), *chance.choices((1, 2, 4), k=2)
        )
        sizes = tuple(chance.randint(1, 3000) for _ in range(3))
        effective = effective_sizes(tile, *sizes)
        steps = (tile.m * (tile.cluster_m or 0), tile.n * (tile.cluster_n or 0), tile.k or 0)
        for size, whole, step in zip(sizes, (effective.m, effective.n, effective.k), steps, strict=True):
            assert whole % step == 0
            assert whole - step < size <= whole
        assert effective.blocks * tile.m * tile.n == effective.m * effective.n
        assert tile_overhead(tile, *sizes) >= 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", "split"),
        ("nvjet_sm121_tst_mma_192x144", "depth of a step; the name has no cluster"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "no cluster"),
    ],
)
def test_what_is_not_exact_says_why(name: str, reason: str) -> None:
    effective = effective_sizes(kernel(name), 4096, 4096, 4096)
    assert not effective.exact
    assert reason in (effective.inexact or "")


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 1.5), (True, 1, 1)])
def test_sizes_are_checked(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="whole number of 1 or more"):
        effective_sizes(TileShape(64, 64, 64, 1, 1), *sizes)


def test_adjusted_ofu() -> None:
    assert adjusted_ofu(0.45, 0.0) == 0.45
    assert adjusted_ofu(0.5, 0.25) == pytest.approx(0.4)
    for ofu, overhead in ((45.0, 0.1), (-0.1, 0.1), (float("nan"), 0.1), (0.4, -0.1), (0.4, float("inf"))):
        with pytest.raises(ValueError, match="must be a share"):
            adjusted_ofu(ofu, overhead)


def run(*options: str) -> int:
    parser = OneLineParser(prog="perf-metrics")
    fill_gemm(parser)
    parsed = parser.parse_args(options)
    status: int = parsed.run(parsed)
    return status


def command(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run(*options) == 0
    return capsys.readouterr().out


def test_command_with_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    # [888 tokens, 512] x [512, 2880 features].
    name = "nvjet_tst_144x128_64x6_2x1_TNN"
    out = command(capsys, "888", "2880", "512", "--kernel", name)
    # 2 x 888 x 2880 x 512 FLOPs at the table's 989.4 TFLOP/s.
    assert "2.619 GFLOP; 2.647 us at 989.4 TFLOP/s of NVIDIA H100 80GB HBM3" in out
    row = out.splitlines()[-1].split()
    assert row == [name, "144x128x64", "2x1", "2880x896x512", "140", "0.90%", "2.671", "yes"]
    assert "prediction" not in out


def test_command_predicts_and_says_that_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    out = command(capsys, "4000", "4000", "4000")
    assert "which kernel cuBLAS picks for these sizes is not known" in out
    answer = json.loads(command(capsys, "4000", "4000", "4000", "--json"))
    overheads = [row["overhead"] for row in answer["kernels"]]
    candidates = {row["name"] for row in answer["kernels"]}
    assert answer["predicted"] is True
    assert f"overhead from {min(overheads):.2%} to {max(overheads):.2%}; prediction" in out
    assert len(overheads) == len(candidates) >= 5
    assert all(name.startswith("nvjet_sm90_") for name in candidates)
    assert answer["seconds_at_peak"] == pytest.approx(2 * 4000**3 / 989.4e12)


def test_a_lower_bound_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "for TF32 cuBLAS chooses kernels that are not among these"
    out = command(capsys, "4000", "4000", "4000", "--dtype", "tf32")
    rows = [line for line in out.splitlines() if line.startswith("sm90_xmma")]
    assert rows
    assert all(row.endswith("  lower bound") for row in rows)
    assert f"%; lower bound: {reason} (up to 33 % overhead" in out
    answer = json.loads(command(capsys, "4000", "4000", "4000", "--dtype", "tf32", "--json"))
    assert all(not row["exact"] and row["inexact"].startswith(reason) for row in answer["kernels"])
    # A kernel that is given is not predicted: what it computes is known.
    given = command(
        capsys, "4000", "4000", "4000", "--dtype", "tf32", "--kernel", "nvjet_tst_144x128_64x6_2x1_TNN"
    )
    assert given.splitlines()[-1].endswith("  yes")
    name = "nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT"
    split = command(capsys, "4000", "4000", "4000", "--kernel", name)
    assert split.splitlines()[-1].endswith("lower bound: k is split, and each part may be rounded up")
    # BF16 has exact rows, and only the split ones are bounds.
    rows = command(capsys, "4000", "4000", "4000").splitlines()
    assert [row.endswith("yes") for row in rows if row.startswith("nvjet")].count(False) == 1


def test_command_for_other_devices_and_formats(capsys: pytest.CaptureFixture[str]) -> None:
    ampere = command(
        capsys, "128", "64", "64", "--device", "NVIDIA A100-SXM4-80GB", "--dtype", "torch.bfloat16"
    )
    assert "cutlass_80_tensorop" in ampere
    consumer = command(capsys, "128", "64", "64", "--device", "NVIDIA GeForce RTX 5090")
    assert "no prediction" in consumer
    unknown = command(capsys, "128", "64", "64", "--device", "NVIDIA H1OO")
    assert "time at the peak unknown" in unknown
    assert "nvjet" not in unknown
    rocm = command(capsys, "128", "64", "64", "--device", "AMD Instinct MI250X")
    assert "no prediction" in rocm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["0", "1", "1"], "M=0"),
        (["1", "1", "1", "--kernel", "nvjet_tst_TNN"], "has no known tile"),
        (["1", "1", "1", "--dtype", "bf61"], "bf61"),
        (["1", "1", "1", "--dtype", "bf61", "--device", "nothing"], "bf61"),
        (["1", "1", "1", "--seconds", "1"], "--seconds=1 needs --measure"),
        (
            ["1", "1", "1", "--measure", "--device", "NVIDIA B200"],
            "--device=NVIDIA B200 and --measure exclude",
        ),
    ],
)
def test_bad_input_names_the_setting(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*options)
