"""Tile quantization: a kernel computes whole tiles, in whole clusters, and so more than was asked for.

Formulas: section on tile quantization of "Instant GPU Efficiency Visibility at Fleet Scale". The copy that
was read had lost its equations; they are rebuilt from the prose, and agree with its worked example and with
the launched grids of four kernels in a public trace (see `tests/ofu`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .kernel_names import GemmKernel, TileShape


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
            raise ValueError(f"{name}={size!r}: must be a whole number of 1 or more")
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
        raise ValueError(f"ofu={ofu!r}: must be a share of the peak from 0 to 1.5; 45 % is 0.45")
    if not 0 <= overhead < math.inf:
        raise ValueError(f"overhead={overhead!r}: must be a share of 0 or more")
    return ofu / (1 + overhead)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _inexact(tile: TileShape, split_k: bool) -> str | None:
    reasons = []
    if split_k:
        reasons.append("k is split, and each part may be rounded up")
    if tile.k is None:
        reasons.append("the name has no depth of a step")
    if tile.cluster_m is None or tile.cluster_n is None:
        reasons.append("the name has no cluster")
    return "; ".join(reasons) or None
