"""A cache directory that one node refuses ends all ranks, and not one that the others wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("ranks")


def test_a_directory_that_one_rank_refuses_is_an_error_on_all(
    launch: Callable[[str, int], list[dict[str, Any]]],
) -> None:
    for told in launch("cache_dir.py", 2):
        assert told["said"].startswith("rank 1 of 2 cannot use its torch_compile_cache_dir: ")
        assert "may be written by others (mode 666)" in told["said"]
