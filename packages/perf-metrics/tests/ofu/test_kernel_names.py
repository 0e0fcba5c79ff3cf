"""Names of kernels: every collected one is read, and nothing else is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf_metrics.ofu.kernels import GemmKernel, TileShape, candidate_kernels, explain, parse_kernel

COLLECTED = [
    line
    for line in Path(__file__).with_name("kernel_names.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def kernel(name: str) -> GemmKernel:
    found = parse_kernel(name)
    assert found is not None, explain(name)
    return found


@pytest.mark.parametrize("name", COLLECTED)
def test_every_collected_name_is_read(name: str) -> None:
    found = kernel(name)
    assert explain(name) is None
    assert found.name in name
    # The digits of the tile stand in the name as they were read.
    parts = [str(part) for part in (found.tile.m, found.tile.n)]
    assert "x".join(parts) in name
    if found.tile.k is not None:
        assert f"x{found.tile.k}_" in name or f"_{found.tile.k}x{found.stages}" in name


def test_the_list_holds_each_name_once() -> None:
    assert len(set(COLLECTED)) == len(COLLECTED) > 60


@pytest.mark.parametrize(
    ("name", "tile", "stages", "formats", "ops", "linear_pass"),
    [
        ("nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT", TileShape(192, 208, 64, 2, 1), 4,
         ("bf16", "bf16", "fp32", "bf16", "bf16"), "TN", "forward"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", TileShape(256, 128, 64, 1, 2), 4,
         ("fp16", "fp16", "fp32", "fp16", "fp16"), "NN", "dgrad"),
        ("nvjet_sm100_qrsss_256x256_128x4_2x1_2cta_v_bz_NTT", TileShape(256, 256, 128, 2, 1), 4,
         ("e4m3", "e5m2", "fp32", "fp32", "fp32"), "NT", "wgrad"),
        # Five letters are A, B, C, accumulate, D.
        ("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT", TileShape(128, 128, 128, 1, 2), 6,
         ("e4m3", "e4m3", "fp32", "bf16", "bf16"), "TN", "forward"),
        ("nvjet_sm121_tst_mma_192x144", TileShape(192, 144), None,
         ("bf16", "bf16", "fp32", "bf16", "bf16"), None, None),
        ("cutlass3x_sm90_tensorop_gemm_f16_f16_f32_void_f32_128x256x64_2x1x1_0_ntn_align8",
         TileShape(128, 256, 64, 2, 1), None, ("fp16", "fp16", "fp32", None, "fp32"), "NT", "wgrad"),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn_align8",
         TileShape(128, 64, 64, 1, 1), 6, (None,) * 5, "TN", "forward"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize256x128x32_cgasize1x2x1_stage4_hgmma64x128x8",
         TileShape(256, 128, 32, 1, 2), 4, ("fp32", "fp32", None, None, None), "TN", "forward"),
        # Hopper has clusters, Ampere has not.
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
         TileShape(128, 128, 64), None, ("bf16", "bf16", None, None, None), "TN", "forward"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16",
         TileShape(32, 32, 64, 1, 1), 6, ("fp16", "fp16", None, None, None), "TN", "forward"),
    ],
)  # fmt: skip
def test_what_a_name_tells(
    name: str, tile: TileShape, stages: int | None, formats: tuple[str | None, ...], ops: str | None,
    linear_pass: str | None,
) -> None:  # fmt: skip
    found = kernel(name)
    assert (found.tile, found.stages, found.ops, found.linear_pass) == (tile, stages, ops, linear_pass)
    assert (found.a, found.b, found.accumulate, found.c, found.d) == formats


def test_flags() -> None:
    found = kernel("nvjet_sm100_oosss_128x256_256x5_2x1_2cta_v_bz_Avec16UE4M3_Bvec16UE4M3_TNT")
    assert found.two_cta
    assert not found.split_k
    assert found.architecture == 100
    assert found.flags == ("v", "bz", "Avec16UE4M3", "Bvec16UE4M3")
    assert kernel("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT").split_k
    assert kernel("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT").architecture == 90
    xmma = (
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_{}_x"
    )
    assert kernel(xmma.format("on")).split_k
    assert not kernel(xmma.format("off")).split_k


def test_rows_written_by_cutlass_swap_the_axes_and_have_no_linear_pass() -> None:
    rows = kernel("cutlass3x_sm90_tensorop_gemm_f16_f16_f32_f16_f16_128x256x64_2x1x1_0_tnt_align8")
    assert rows.row_major
    assert rows.linear_pass is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nvjet_sm90_tst_192x208_64x4_2x1_v_bz_streamK_TNT", "unknown meaning: streamK"),
        ("nvjet_sm90_tst_192x208_64x4_2x1_v_bz_TNTN", "unknown meaning: TNTN"),
        # Real, of consumer Blackwell: another grammar.
        ("nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN", "another form"),
        # A cluster in the place of depth and stages.
        ("nvjet_sm90_tst_128x256_2x1_v_bz_TNT", "second pair, 2x1"),
        ("nvjet_tst_TNN", "another form"),
        ("nvjet_sm90_tsts_128x256_64x4_2x1_v_bz_TNT", "another form"),
        (
            "cutlass3x_sm100_tensorop_gemm_f16_f16_f32_f16_f16_256x128x64_4x4x1_0_ntt_align8_2sm",
            "architecture",
        ),
        ("cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_cvt_s8_f16_f16_128x128x64_2x1x1_0_ntn", "form"),
        ("cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8", "another form"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize_cgasize1x1x1", "another form"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "no naming"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x128x8_stage3_warpsize4x2x1_ffma_aligna4",
            "tensor",
        ),
        ("ampere_sgemm_64x32_sliced1x4_tn", "tensor cores"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "tensor cores"),
        ("void at::native::elementwise_kernel<128, 4>", "no naming scheme"),
        ("", "no naming scheme"),
    ],
)
def test_other_names_are_not_guessed(name: str, reason: str) -> None:
    assert parse_kernel(name) is None
    assert reason in (explain(name) or "")


def test_a_tile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster_m=0"):
        TileShape(64, 64, 64, 0, 1)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_candidates_are_of_their_number_format(capability: str) -> None:
    formats = {"bf16": {"bf16", "fp16", None}, "fp8": {"e4m3"}, "fp4": {"fp4"}, "tf32": {"fp32", None}}
    found = {dtype: candidate_kernels(capability, dtype) for dtype in formats}
    assert found["bf16"]
    for dtype, kernels in found.items():
        assert {kernel.a for kernel in kernels} <= formats[dtype]
    assert candidate_kernels("12.0", "bf16") == candidate_kernels(None, "bf16") == ()
