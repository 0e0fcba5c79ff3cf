"""powerSGD with two ranks: what comes out, what is owed and what is sent."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("two ranks")

ALL_MATRICES = [
    "convolution.weight",
    "first.weight",
    "last.weight",
    "second.weight",
    "seldom.weight",
]


def test_factors_of_full_rank_give_the_exact_mean(two_ranks: Any) -> None:
    for found in two_ranks.of("full_rank"):
        assert found["compressed"] == ALL_MATRICES
        assert found["torch.float32"]["worst"] < 3e-6
        assert found["torch.float64"]["worst"] < 1e-13
        # Ranks owe one another, but not the mean.
        assert found["torch.float64"]["owed"] < 1e-15


def test_what_was_sent_and_what_is_owed_are_the_sum_of_the_gradients(two_ranks: Any) -> None:
    for found in two_ranks.of("error_feedback"):
        assert found["float32"] < 1e-6
        # The averaged gradient itself is rounded to 8 bits in each of 8 steps.
        assert found["bfloat16"] < 2**-8
        # That is no matter of course: a single step is far from the mean, and every matrix owes something.
        assert found["one step alone"] > 0.1
        assert found["owed"] > 0


def test_ranks_share_factors_and_have_errors_of_their_own(two_ranks: Any) -> None:
    for found in two_ranks.of("error_feedback"):
        assert found["factors same"]
        assert not found["errors same"]
        # Also those of bfloat16 gradients, which are smaller than what 8 bits could add up.
        assert found["dtypes"] == ["torch.float32"]


def test_bytes_are_those_counted_by_hand(two_ranks: Any) -> None:
    # Left factor and mark, right factor. The matrix [1, 24] of the last layer would grow.
    second = (2 * 24 + 1) + 2 * 32
    seldom = (2 * 32 + 1) + 2 * 32
    convolution = (2 * 16 + 1) + 2 * (2 * 4)
    first = (2 * 32 + 1) + 2 * 144
    whole = (24 + 1) + 24 + 32
    compressed = 4 * (second + seldom + convolution + first + whole)
    for found in two_ranks.of("traffic"):
        plain = 4 * sum(found["elements"].values())
        assert found["bytes"] == [plain, plain, compressed, compressed]


def test_buckets_and_their_views_change_no_bit(two_ranks: Any) -> None:
    for found in two_ranks.of("options"):
        assert found["same"]


def test_random_numbers_of_the_training_are_left_alone(two_ranks: Any) -> None:
    for found in two_ranks.of("options"):
        assert found["generator"]


def test_autocast_does_not_round_the_factors(two_ranks: Any) -> None:
    for difference in two_ranks.of("under_autocast"):
        assert difference < 1e-5


def test_a_gradient_that_lies_in_another_order_in_memory_is_the_same_matrix(two_ranks: Any) -> None:
    for found in two_ranks.of("channels_last"):
        assert found["strides"][1] == 1
        assert found["difference"] < 1e-5


def test_inf_on_one_rank_reaches_all_and_leaves_no_trace(two_ranks: Any) -> None:
    for found in two_ranks.of("not_finite"):
        assert found["not finite"] == ["second.weight"]
        assert found["owed"] == 0
        assert found["factor kept"]
        assert found["later finite"]
        assert found["later sent"] > 0
        assert found["later same"]


def test_what_is_owed_of_an_unused_parameter_stays_owed(two_ranks: Any) -> None:
    for found in two_ranks.of("unused"):
        assert not found["gradient"]
        assert found["kept"] == [True, True]
        assert found["others continue"]


def test_use_by_one_rank_is_enough(two_ranks: Any) -> None:
    for found in two_ranks.of("unused"):
        assert found["used by one"] > 0
        assert found["moved"]


def test_a_regression_converges_as_with_whole_gradients(two_ranks: Any) -> None:
    for found in two_ranks.of("converges"):
        start, end = found["compressed"]
        assert end < start / 10
        assert end < 1.3 * found["whole"][1]
        assert found["compressed same"]
