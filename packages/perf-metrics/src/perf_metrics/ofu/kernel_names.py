"""What the name of a matrix multiplication kernel tells: its tile, its cluster and its number formats.

There is no published grammar for cuBLAS's names. The rules here are read from names in public traces (the
list in the tests); CUTLASS documents its own. A name that does not follow them is not read at all: `explain`
says why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

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
                raise ValueError(f"TileShape.{name}={value}: must be 1 or more")


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
    words = tuple(word for word in match["words"].split("_") if word)
    unknown = [word for word in words if not _NVJET_WORD.fullmatch(word)]
    if unknown:
        return f"an nvjet name with words of unknown meaning: {', '.join(unknown)}"
    tile = _tile(match)
    if tile.k is not None and tile.k < _SMALLEST_K:
        return f"an nvjet name whose second pair, {tile.k}x{match['stages']}, is no depth and stages"
    letters = match["types"]
    if len(letters) == 3:
        letters = letters[0] * 2 + letters[2] + letters[1] + letters[2]
    a, b, c, accumulate, d = (_FORMATS.get(letter) for letter in letters)
    return GemmKernel(
        name=name,
        family="nvjet",
        architecture=_number(match["sm"]),
        tile=tile,
        stages=_number(match["stages"]),
        two_cta=match["two"] is not None,
        split_k="splitK" in words,
        a=a,
        b=b,
        accumulate=accumulate,
        c=c,
        d=d,
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
    words = tuple(word for word in match["words"].split("_") if word)
    return GemmKernel(
        name=name,
        family="cutlass3x",
        architecture=90,
        tile=_tile(match),
        stages=_number(match["stages"]) or None,
        split_k=any(word in ("stream", "streamk", "splitk") for word in words),
        a=_cutlass_format(match["a"]),
        b=_cutlass_format(match["b"]),
        accumulate=_cutlass_format(match["accumulate"]),
        c=_cutlass_format(match["c"]),
        d=_cutlass_format(match["d"]),
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
    words = tuple(word for word in match["words"].split("_") if word)
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
    words = tuple(word for word in match["words"].split("_") if word)
    if "ffma" in words:
        return PLAIN_CORES
    tile = _tile(match)
    if int(match["sm"]) < 90:
        tile = TileShape(tile.m, tile.n, tile.k, 1, 1)
    pair = re.match(r"([a-z]+\d+)\1(?:_|$)", match["types"])
    return GemmKernel(
        name=name,
        family="xmma",
        architecture=int(match["sm"]),
        tile=tile,
        stages=_number(match["stages"]),
        split_k="segment_k_on" in match["words"],
        a=_cutlass_format(pair[1]) if pair else None,
        b=_cutlass_format(pair[1]) if pair else None,
        ops=match["ops"].upper(),
        row_major=match["out"] == "t",
        flags=words,
    )


def _tile(match: re.Match[str]) -> TileShape:
    m, n, k, cluster_m, cluster_n = (_number(match[key]) for key in ("m", "n", "k", "cm", "cn"))
    return TileShape(m or 0, n or 0, k, cluster_m, cluster_n)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


_SCHEMES: tuple[tuple[re.Pattern[str], Callable[[str], GemmKernel | str]], ...] = (
    (re.compile(r"\bnvjet_\w+"), _nvjet),
    (re.compile(r"\bcutlass3x_\w+"), _cutlass3),
    (re.compile(r"\bcutlass_80_\w+"), _cutlass2),
    (re.compile(r"\bsm\d+_xmma_gemm_\w+"), _xmma),
)
