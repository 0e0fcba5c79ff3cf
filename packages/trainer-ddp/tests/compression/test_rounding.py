"""fp16 and bf16: the averages of DDP but for rounding, with half the bytes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("two ranks")

# A gradient is rounded once on each rank and once in their sum.
BOUNDS = {"fp16": 2 * 2**-11, "bf16": 2 * 2**-8}


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_average_is_that_of_ddp_within_rounding(two_ranks: Any, method: str) -> None:
    for found in two_ranks.of("rounding"):
        assert found["DDP beside the mean"] < 1e-6
        assert 0 < found[method]["difference"] <= BOUNDS[method]
        assert found[method]["same"]


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_two_bytes_are_sent_for_each_element(two_ranks: Any, method: str) -> None:
    for found in two_ranks.of("rounding"):
        assert found[method]["bytes"] == 3 * 2 * found["elements"]


@pytest.mark.parametrize("method", ["fp16", "bf16"])
def test_rounding_has_no_state(two_ranks: Any, method: str) -> None:
    for found in two_ranks.of("rounding"):
        assert found[method]["state"] == {}
        assert found[method]["components"] == 0


def test_what_has_16_bits_already_travels_as_it_is(two_ranks: Any) -> None:
    for found in two_ranks.of("rounding_of_some"):
        # Two layers of 8 x 8 weights and 8 biases.
        assert found == {"bytes": 2 * 2 * 72, "finite": True, "same": True}
