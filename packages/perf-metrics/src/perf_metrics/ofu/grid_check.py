"""Holding a launched grid against the number of blocks that the formula gives."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .kernel_names import GemmKernel


class GridCheck(enum.Enum):
    """What a launched grid says about the formula."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNCHECKED = "unchecked"

    @classmethod
    def of(
        cls, kernel: GemmKernel, blocks: int, grid: Sequence[int] | None, multiprocessors: int | None
    ) -> GridCheck:
        """Compare a grid with the formula.

        A persistent kernel starts at most one block for each multiprocessor, so a grid can only be held
        against the formula if the formula gives no more blocks than that. cutlass_80 pads its grid for the
        order of the tiles, and how XMMA lays out its grid was not seen: neither is checked.

        Args:
            kernel: What the name tells.
            blocks: Thread blocks by the formula, over the whole batch, before any split of k.
            grid: As launched, or None if it is not known.
            multiprocessors: Of the device, or None if it is not known.
        """
        if grid is None or kernel.family not in ("nvjet", "cutlass3x") or not _whole(kernel):
            return cls.UNCHECKED
        # Only the product: which side of the grid is which, and where the clusters are, differs by kernel.
        launched = prod(grid)
        if launched == blocks or (kernel.split_k and launched % blocks == 0):
            return cls.AGREES
        if launched > blocks and not kernel.split_k:
            return cls.DIFFERS
        # Into how many parts k is split is not told, so they may be more than there are multiprocessors.
        wanted = math.inf if kernel.split_k and launched > blocks else blocks
        persistent = multiprocessors is None or wanted > multiprocessors >= launched
        return cls.UNCHECKED if persistent else cls.DIFFERS


@dataclass(frozen=True, slots=True)
class GridChecks:
    """Launches of one kernel by what their grids say.

    Attributes:
        agree: The grid is what the formula gives.
        differ: It is not: the name was misread, the axes are others, or the operator's shapes are not those
            of the kernel.
        unchecked: The kernel is persistent, or the trace does not tell.
        example: The first that differs, in words.
    """

    agree: int
    differ: int
    unchecked: int
    example: str | None = None


def _whole(kernel: GemmKernel) -> bool:
    return kernel.tile.cluster_m is not None and kernel.tile.cluster_n is not None
