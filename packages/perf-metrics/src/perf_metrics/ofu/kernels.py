"""Matrix multiplication kernels: what their names tell, which are known, and what their tiles cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

# There is no published grammar for cuBLAS's names. The rules here are read from names in public traces (the
# list in the tests); CUTLASS documents its own. A name that does not follow them is not read at all:
# `explain` says why.

Family: TypeAlias = Literal["nvjet", "cutlass3x", "cutlass_80", "xmma"]

LINEAR_PASS: Mapping[str, str] = {"TN": "forward", "NN": "dgrad", "NT": "wgrad"}
"""What a linear layer of torch (weight of [out, in]) uses each pair of operations for."""

_FORMATS = {"h": "fp16", "t": "bf16", "s": "fp32", "q": "e4m3", "r": "e5m2", "o": "fp4"}
PLAIN_CORES = "does not run on tensor cores"
"""The reason given for kernels that the tensor pipe's counter does not see."""

_PLAIN_CORES = re.compile(r"gemv|splitk_?reduce|_simt_|_sgemm_", re.IGNORECASE)

_SMALLEST_K = 16
"""The least depth of a step in the collected names; a cluster is never as large."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """What one thread block computes, and how many of them form a cluster.

    Attributes:
        m: Rows of the tile along cuBLAS's m, which is torch's out_features.
        n: Columns along cuBLAS's n, which is torch's tokens. See `GemmKernel.row_major` for the exception.
        k: Depth of one step, or None where the name does not tell.
        cluster_m: Thread blocks of a cluster along m, or None where the name does not tell.
        cluster_n: The same along n.
    """

    m: int
    n: int
    k: int | None = None
    cluster_m: int | None = None
    cluster_n: int | None = None

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "cluster_m", "cluster_n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"TileShape.{name}={value} must be 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmKernel:
    """A matrix multiplication kernel, as its name describes it.

    Attributes:
        name: The name, without the template around it.
        family: Whose naming scheme it follows.
        architecture: Number of the compute capability, such as 90, or None where the name has none.
        tile: The tile of a thread block and its cluster.
        stages: Steps of k that are kept in flight, or None.
        two_cta: Two thread blocks share one instruction (Blackwell). The tile is still that of one block.
        split_k: Several blocks share the k of one tile. How many is not in the name.
        a: Number format of A: "fp16", "bf16", "fp32", "e4m3", "e5m2", "fp4" or as the name has it; None
            where the name does not tell. `b`, `accumulate`, `c`, `d` likewise.
        ops: Operations on A and B in column-major terms: "TN", "NN", "NT" or "TT"; None if not told.
        row_major: The kernel writes rows (CUTLASS, third letter "t"): its m is then torch's tokens.
        flags: The other words of the name.
    """

    name: str
    family: Family
    architecture: int | None
    tile: TileShape
    stages: int | None = None
    two_cta: bool = False
    split_k: bool = False
    a: str | None = None
    b: str | None = None
    accumulate: str | None = None
    c: str | None = None
    d: str | None = None
    ops: str | None = None
    row_major: bool = False
    flags: tuple[str, ...] = ()

    @property
    def linear_pass(self) -> str | None:
        """The pass of a linear layer that uses these operations: "forward", "dgrad", "wgrad"; or None."""
        return None if self.row_major else LINEAR_PASS.get(self.ops or "")


def parse_kernel(name: str) -> GemmKernel | None:
    """Read a kernel's name as the profiler shows it, with or without a template around it.

    Returns:
        What the name tells, or None for a name that does not follow a known scheme or that does not run on
        tensor cores; `explain` gives the reason.
    """
    found = _read(name)
    return found if isinstance(found, GemmKernel) else None


def explain(name: str) -> str | None:
    """Why `parse_kernel` gives None for a name; None if it does not."""
    found = _read(name)
    return found if isinstance(found, str) else None


@lru_cache(maxsize=4096)
def _read(name: str) -> GemmKernel | str:
    """The kernel, or the reason why the name is not read."""
    for start, read in _SCHEMES:
        found = start.search(name)
        if found:
            return read(found.group())
    if _PLAIN_CORES.search(name):
        return PLAIN_CORES
    return "follows no naming scheme that is known here (nvjet, cutlass3x, cutlass_80, xmma)"


_NVJET = re.compile(
    r"nvjet_(?:sm(?P<sm>\d+)_)?(?P<types>[a-z]{5}|[a-z]{3})(?:_(?P<path>mma|tf32))?"
    r"_(?P<m>\d+)x(?P<n>\d+)(?:_(?P<k>\d+)x(?P<stages>\d+))?(?:_(?P<cm>\d+)x(?P<cn>\d+))?"
    r"(?P<two>_2cta)?(?P<words>(?:_[A-Za-z0-9]+)*?)(?:_(?P<ops>[NT]{2})[NT])?"
)
_OPERANDS = ("a", "b", "c", "accumulate", "d")
_NVJET_WORD = re.compile(r"v|h|bz|badd|bx|coop[AB]|splitK|bias|ovscale|algo\d+|[AB]vec\d+U[A-Z0-9]+")


def _nvjet(name: str) -> GemmKernel | str:
    """cuBLAS since CUDA 12.6: `nvjet_[smXX_]TYPES_MxN_KxSTAGES_CMxCN_..._OPS`.

    Three types are those of A and B, accumulate, C and D; five are A, B, C, accumulate, D. That r is e5m2 is
    inferred from backward passes. badd adds C; what bz, bx, v and h mean is not documented. The order of the
    tile's sides is proven by grids of a public trace (`tests/ofu`).
    """
    match = _NVJET.fullmatch(name)
    if match is None:
        return "an nvjet name of another form than nvjet_[smXX_]TYPES_MxN_KxSTAGES_CMxCN_..._OPS"
    words = _words(match)
    unknown = [word for word in words if not _NVJET_WORD.fullmatch(word)]
    if unknown:
        return f"an nvjet name with words of unknown meaning: {', '.join(unknown)}"
    tile = _tile(match)
    if tile.k is not None and tile.k < _SMALLEST_K:
        return f"an nvjet name whose second pair, {tile.k}x{match['stages']}, is not a depth and stages"
    letters = match["types"]
    if len(letters) == 3:
        letters = letters[0] * 2 + letters[2] + letters[1] + letters[2]
    formats: dict[str, Any] = {
        name: _FORMATS.get(letter) for name, letter in zip(_OPERANDS, letters, strict=True)
    }
    return GemmKernel(
        name=name,
        family="nvjet",
        architecture=_number(match["sm"]),
        tile=tile,
        stages=_number(match["stages"]),
        two_cta=match["two"] is not None,
        split_k="splitK" in words,
        **formats,
        ops=match["ops"],
        flags=((match["path"],) if match["path"] else ()) + words,
    )


_CUTLASS3 = re.compile(
    r"cutlass3x_sm(?P<sm>90)_tensorop_(?:[a-z]\d+x\d+x\d+[a-z0-9]*)?gemm"
    r"_(?P<a>[a-z]+\d+[a-z0-9]*)_(?P<b>[a-z]+\d+[a-z0-9]*)_(?P<accumulate>[a-z]+\d+[a-z0-9]*)_(?P<c>void|[a-z]+\d+[a-z0-9]*)_(?P<d>[a-z]+\d+[a-z0-9]*)"
    r"_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_(?P<cm>\d+)x(?P<cn>\d+)x1_(?P<stages>\d+)"
    r"_(?P<ops>[nt]{2})(?P<out>[nt])(?P<words>(?:_[a-z0-9]+)*)"
)


def _cutlass3(name: str) -> GemmKernel | str:
    """CUTLASS 3 on Hopper: A, B, accumulate, C, D, tile, cluster, stages (0: automatic), three layouts.

    The instruction's shape before "gemm" is left out since CUTLASS 3.9. Layouts are n for column-major and t
    for row-major, as its profiler's documentation has it.
    """
    if not name.startswith("cutlass3x_sm90_"):
        return "a CUTLASS 3 name of another architecture than sm90: not known to give the tile of one block"
    match = _CUTLASS3.fullmatch(name)
    if match is None:
        return "a CUTLASS 3 name of another form than ..gemm_A_B_ACC_C_D_MxNxK_CMxCNx1_STAGES_LAYOUTS.."
    words = _words(match)
    formats: dict[str, Any] = {name: _cutlass_format(match[name]) for name in _OPERANDS}
    return GemmKernel(
        name=name,
        family="cutlass3x",
        architecture=90,
        tile=_tile(match),
        stages=_number(match["stages"]) or None,
        split_k=any(word in ("stream", "streamk", "splitk") for word in words),
        **formats,
        ops=match["ops"].upper(),
        row_major=match["out"] == "t",
        flags=words,
    )


def _cutlass_format(word: str) -> str | None:
    return {"f16": "fp16", "f32": "fp32", "void": None}.get(word, word)


_CUTLASS2 = re.compile(
    r"cutlass_80_tensorop_(?:[a-z0-9]+_)??(?:[a-z])\d+[a-z0-9]*gemm(?P<words>(?:_[a-z][a-z0-9]*)*)"
    r"_(?P<m>\d+)x(?P<n>\d+)_(?P<k>\d+)x(?P<stages>\d+)_(?P<ops>[nt]{2})(?P<align>_align\d+)?"
)


def _cutlass2(name: str) -> GemmKernel | str:
    """CUTLASS 2, as cuBLAS carries it for Ampere: no clusters there; number formats are left untold."""
    match = _CUTLASS2.fullmatch(name)
    if match is None:
        return "a cutlass_80 name of another form than cutlass_80_tensorop_.._MxN_KxSTAGES_OPS_alignX"
    words = _words(match)
    return GemmKernel(
        name=name,
        family="cutlass_80",
        architecture=80,
        tile=TileShape(int(match["m"]), int(match["n"]), int(match["k"]), 1, 1),
        stages=int(match["stages"]),
        split_k=any("split" in word for word in words),
        ops=match["ops"].upper(),
        flags=words,
    )


_XMMA = re.compile(
    r"sm(?P<sm>\d+)_xmma_gemm_(?P<types>\w+?)_(?P<ops>[nt]{2})_(?P<out>[nt])"
    r"_tilesize(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)(?:_cgasize(?P<cm>\d+)x(?P<cn>\d+)x1)?"
    r"(?:_stage(?P<stages>\d+))?(?P<words>(?:_+[A-Za-z0-9]+)*)"
)


def _xmma(name: str) -> GemmKernel | str:
    """XMMA, cuBLAS before nvjet: types, operations, layout of the result, tile, sometimes the cluster.

    Before Hopper there are no clusters. Which operand each type is of is not documented: A and B are told
    only where the first two types agree.
    """
    match = _XMMA.fullmatch(name)
    if match is None:
        return "an XMMA name of another form than smXX_xmma_gemm_TYPES_OPS_L_tilesizeMxNxK.."
    words = _words(match)
    if "ffma" in words:
        return PLAIN_CORES
    tile = _tile(match)
    if int(match["sm"]) < 90:
        tile = TileShape(tile.m, tile.n, tile.k, 1, 1)
    pair = re.match(r"([a-z]+\d+)\1(?:_|$)", match["types"])
    operand = _cutlass_format(pair[1]) if pair else None
    return GemmKernel(
        name=name,
        family="xmma",
        architecture=int(match["sm"]),
        tile=tile,
        stages=_number(match["stages"]),
        split_k="segment_k_on" in match["words"],
        a=operand,
        b=operand,
        ops=match["ops"].upper(),
        row_major=match["out"] == "t",
        flags=words,
    )


def _tile(match: re.Match[str]) -> TileShape:
    m, n, k, cluster_m, cluster_n = (_number(match[key]) for key in ("m", "n", "k", "cm", "cn"))
    return TileShape(m or 0, n or 0, k, cluster_m, cluster_n)


def _words(match: re.Match[str]) -> tuple[str, ...]:
    return tuple(word for word in match["words"].split("_") if word)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


_SCHEMES: tuple[tuple[re.Pattern[str], Callable[[str], GemmKernel | str]], ...] = (
    (re.compile(r"\bnvjet_\w+"), _nvjet),
    (re.compile(r"\bcutlass3x_\w+"), _cutlass3),
    (re.compile(r"\bcutlass_80_\w+"), _cutlass2),
    (re.compile(r"\bsm\d+_xmma_gemm_\w+"), _xmma),
)


# Kernels seen in public traces, by architecture and number format. Which kernel cuBLAS picks for given sizes
# is not known outside of it; the list is what the survey of public traces met, not what cuBLAS has.

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


# Formulas: section on tile quantization of "Instant GPU Efficiency Visibility at Fleet Scale". The copy that
# was read had lost its equations; they are rebuilt from the prose, and agree with its worked example and with
# the launched grids of four kernels in a public trace (see `tests/ofu`).


@dataclass(frozen=True, slots=True)
class EffectiveSizes:
    """The sizes that a kernel really computes.

    Attributes:
        m: Effective size along the kernel's m, rounded up to whole tiles and whole clusters.
        n: The same along n.
        k: Effective depth, rounded up to whole steps.
        blocks_m: Thread blocks along m, those that only fill up a cluster included.
        blocks_n: The same along n.
        inexact: Why the sizes are a lower bound; None if they are exact.
    """

    m: int
    n: int
    k: int
    blocks_m: int
    blocks_n: int
    inexact: str | None = None

    @property
    def exact(self) -> bool:
        """Whether everything that the sizes depend on is known."""
        return self.inexact is None

    @property
    def blocks(self) -> int:
        """Thread blocks of one matrix multiplication, before any split of k."""
        return self.blocks_m * self.blocks_n

    @property
    def flops(self) -> int:
        """FLOPs that are computed: 2 m n k."""
        return 2 * self.m * self.n * self.k


def effective_sizes(kernel: GemmKernel | TileShape, m: int, n: int, k: int) -> EffectiveSizes:
    """Round the sizes of a matrix multiplication up to what the kernel computes.

    M' = ceil(ceil(M / TM) / CM) CM TM, N' likewise, K' = ceil(K / TK) TK. A thread block that only fills up
    its cluster computes a tile like the others.

    Args:
        kernel: A kernel as `parse_kernel` gives it, or a tile.
        m: Size along cuBLAS's m: torch's out_features. For a kernel that is `row_major`: torch's tokens.
        n: The other one.
        k: Depth.

    Returns:
        The sizes. Where the name leaves out the cluster or the depth of a step, they are taken as 1 and the
        result is a lower bound, marked `inexact`; so is that of a split k, as each part may be rounded up.

    Raises:
        ValueError: A size is not a whole number of 1 or more.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number of 1 or more.")
    tile = kernel if isinstance(kernel, TileShape) else kernel.tile
    blocks_m = _round_up(-(-m // tile.m), tile.cluster_m or 1)
    blocks_n = _round_up(-(-n // tile.n), tile.cluster_n or 1)
    return EffectiveSizes(
        m=blocks_m * tile.m,
        n=blocks_n * tile.n,
        k=_round_up(k, tile.k or 1),
        blocks_m=blocks_m,
        blocks_n=blocks_n,
        inexact=_inexact(tile, isinstance(kernel, GemmKernel) and kernel.split_k),
    )


def tile_overhead(kernel: GemmKernel | TileShape, m: int, n: int, k: int) -> float:
    """Share of work on top of what was asked for: M'N'K' / (MNK) - 1; 0.0156 is 1.56 %.

    Arguments and errors are those of `effective_sizes`; where that is a lower bound, so is this.
    """
    return effective_sizes(kernel, m, n, k).flops / (2 * m * n * k) - 1


def adjusted_ofu(ofu: float, overhead: float) -> float:
    """OFU with the extra work of the tiles divided out: OFU / (1 + overhead).

    Args:
        ofu: As a share of the peak: 0.45 is 45 %.
        overhead: As `tile_overhead` gives it, or over a whole trace.

    Raises:
        ValueError: `ofu` is not a share, or `overhead` is negative or not finite.
    """
    # Above 1 is possible, as the clock may be above that of the peak (1980 MHz for 1830 on an H100).
    if not 0 <= ofu <= 1.5:
        raise ValueError(f"ofu={ofu!r} must be a share of the peak from 0 to 1.5, such as 0.45 for 45 %.")
    if not 0 <= overhead < math.inf:
        raise ValueError(f"overhead={overhead!r} must be a share of 0 or more.")
    return ofu / (1 + overhead)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _inexact(tile: TileShape, split_k: bool) -> str | None:
    reasons = {
        "k is split, and each part may be rounded up": split_k,
        "the name has no depth of a step": tile.k is None,
        "the name has no cluster": tile.cluster_m is None or tile.cluster_n is None,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None
