"""Kernels seen in public traces, by architecture and number format: what a prediction chooses from.

Which kernel cuBLAS picks for given sizes is not known outside of it. The list is what the survey of public
traces met, not what cuBLAS has.
"""

from __future__ import annotations

from collections.abc import Mapping

from .kernel_names import GemmKernel, parse_kernel

_HOPPER_16 = (
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT",
    "nvjet_sm90_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
    "nvjet_sm90_hsh_320x128_64x3_1x2_h_bz_coopB_TNT",
    "nvjet_sm90_tst_192x208_64x4_2x1_v_bz_coopB_bias_TNT",
    "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN",
    "nvjet_sm90_tst_512x8_64x3_2x1_v_bz_TNT",
    "nvjet_sm90_tst_192x8_64x8_2x1_v_bz_TNT",
    "nvjet_sm90_tst_128x8_64x12_4x1_v_bz_TNT",
    "nvjet_sm90_tst_64x16_64x16_4x1_v_bz_splitK_TNT",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT",
)
_HOPPER_8 = (
    "nvjet_sm90_qqtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT",
    "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT",
)
_HOPPER_TF32 = (
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize256x128x32_warpgroupsize2x1x1"
    "_execute_segment_k_off_kernel__5x_cublas",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1"
    "_execute_segment_k_off_kernel__5x_cublas",
)
_AMPERE_16 = (
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8",
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8",
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128_64x3_nn_align8",
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_64x256_32x4_nn_align8",
    "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn_align8",
)
_AMPERE_TF32 = (
    "cutlass_80_tensorop_s1688gemm_256x128_16x3_nn_align4",
    "cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4",
    "cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4",
    "cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4",
    "cutlass_80_tensorop_s1688gemm_128x64_16x6_tn_align4",
)
_BLACKWELL_16 = (
    "nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT",
    "nvjet_sm100_tst_256x128_64x5_2x1_2cta_v_bz_TNT",
    "nvjet_sm100_tst_192x288_64x5_2x1_2cta_v_bz_TNT",
    "nvjet_sm100_tst_64x32_64x16_2x1_2cta_v_bz_TNT",
    "nvjet_sm100_tst_128x24_64x11_4x2_h_bz_TNT",
    "nvjet_sm100_tst_32x64_64x16_4x1_v_bz_TNN",
    "nvjet_sm100_tst_16x64_64x16_4x1_v_bz_TNN",
)
_BLACKWELL_8 = (
    "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT",
    "nvjet_sm100_qqtst_128x16_128x12_2x1_2cta_v_bz_TNT",
)
_BLACKWELL_4 = (
    "nvjet_sm100_oosss_128x256_256x5_2x1_2cta_v_bz_Avec16UE4M3_Bvec16UE4M3_TNT",
    "nvjet_sm100_ootst_128x128_256x7_4x1_2cta_v_bx_Avec16UE4M3_Bvec16UE4M3_TNT",
)

# By compute capability, not by the name of the architecture: consumer Blackwell (12.x) has other kernels.
_SEEN: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("9.0", "bf16"): _HOPPER_16,
    ("9.0", "fp16"): _HOPPER_16,
    ("9.0", "tf32"): _HOPPER_TF32,
    ("9.0", "fp8"): _HOPPER_8,
    ("8.0", "bf16"): _AMPERE_16,
    ("8.0", "fp16"): _AMPERE_16,
    ("8.0", "tf32"): _AMPERE_TF32,
    ("10.0", "bf16"): _BLACKWELL_16,
    ("10.0", "fp16"): _BLACKWELL_16,
    ("10.0", "fp8"): _BLACKWELL_8,
    ("10.0", "fp4"): _BLACKWELL_4,
}


def candidate_kernels(compute_capability: str | None, dtype: str) -> tuple[GemmKernel, ...]:
    """Kernels of an architecture and a number format that public traces show.

    BF16 and FP16 share their tiles, so names of either stand for both.

    Args:
        compute_capability: Such as "9.0", of an NVIDIA device.
        dtype: "bf16", "fp16", "tf32", "fp8" or "fp4".

    Returns:
        The kernels; empty where none was collected.
    """
    names = _SEEN.get((compute_capability or "", dtype), ())
    return tuple(kernel for kernel in map(parse_kernel, names) if kernel is not None)
