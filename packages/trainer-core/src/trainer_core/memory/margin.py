"""What a plan of memory adds for all that it does not know."""

from __future__ import annotations

_SHARE, _BYTES = 0.05, 2**30

MARGIN_STANDS_FOR = (
    "fragmentation of the allocator, workspaces of kernels, buffers of NCCL, the libraries themselves"
)
"""What no plan counts."""


def margin_of(size: int) -> int:
    """Bytes to add to so many that are planned: 5 % of them, and 1 GiB."""
    return int(_SHARE * size) + _BYTES
