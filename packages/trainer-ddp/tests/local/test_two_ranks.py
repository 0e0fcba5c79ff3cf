"""PostLocalSGD and DiLoCo on two ranks; the worker runs once, and each test looks at one of its scenarios."""

import pytest

pytestmark = pytest.mark.xdist_group("worlds")

FLOAT = 4
# Linear(4, 6), BatchNorm1d(6), a tied Linear(6, 6) without bias, Linear(6, 2); the frozen layer stays home.
TRAINED = (4 * 6 + 6) + (6 + 6) + 6 * 6 + (6 * 2 + 2)
# Of the weights of the expert, which nothing uses, there is no optimizer state.
USED = TRAINED - (6 * 2 + 2)


def test_averaging_after_each_step_of_sgd_is_data_parallel_training(two):
    assert two.agreed("period_one_is_data_parallel") < 1e-6


def test_phases_begin_and_end_at_their_steps(two):
    # Gradients averaged among, weights and optimizer state said to differ, and whether parameters do.
    together, apart, averaged = (
        ["all", False, False, False],
        ["none", True, True, True],
        ["none", False, True, False],
    )
    local = [apart, apart, apart, averaged]
    assert two.agreed("phases") == [together] * 3 + local * 2 + [apart]


@pytest.mark.parametrize("case", ["adamw", "mixed", "bf16", "diloco"])
def test_the_means_are_there_for_a_while_and_leave_no_trace(two, case):
    assert two.agreed("synced_weights")[case] == {
        "differed": True,
        "equal inside": True,
        "error of the mean": 0.0,
        "restored": True,
        "restored after an error": True,
        "optimizer untouched when not asked for": True,
        "claims inside": [False, False],
        "cache inside": True,
    }


def test_diloco_with_unit_steps_takes_the_mean(two):
    # anchor - (anchor - mean) rounds twice, each time by at most 2**-24 of a number that is at most the sum.
    assert two.agreed("unit_outer_step") <= 2**-23


def test_diloco_is_its_formula(two):
    errors = two.agreed("outer_steps")
    assert len(errors) == 4
    assert max(errors) < 1e-6


def test_traffic_is_what_is_sent(two):
    # Running mean and variance, and the batch counter, an int64: shared once when the ranks part, too.
    buffers = FLOAT * (6 + 6) + 8
    weights = FLOAT * TRAINED + buffers
    # Two moments of AdamW and a step count of each of five parameters; two int64 to compare each of seven.
    moments = FLOAT * (2 * USED + 5) + 2 * 8 * 7
    seen = two.agreed("traffic")
    assert seen == {"local": buffers, "synced_weights": weights + moments, "averaging": weights}


def test_messages_of_any_kind_of_tensor_are_of_bounded_size(two):
    seen = two.agreed("messages")
    assert set(seen["errors"].values()) == {0.0}
    assert seen["first rank's"] == [[True, True, False], 7]
    # float32 of 50 + 0 + 1 + 12 + 9 elements, 3 of float64, 3 of complex64, 3 of bool, 1 of int64.
    assert seen["bytes"] == [72 * 4 + 3 * 8 + 3 * 8 + 3 + 8, 64]
    assert seen["agree"] == [True, False, True, True]


def test_a_run_that_is_started_again_goes_on_to_the_last_bit(two):
    # Saved in the warm-up, at its end, twice between averagings, and at one.
    seen = two.agreed("resume")
    assert len(seen) == 16
    assert [case for case, exact in seen.items() if not exact] == []


def test_state_that_one_rank_has_is_left_out_of_the_mean_and_comes_back(two):
    none, some = [rank["expert_of_one_rank"] for rank in two.seen]
    assert none["own"] == none["inside"] == some["inside"] == []
    assert len(some["own"]) == 6
    assert all(seen["restored"] and seen["resumed"] for seen in (none, some))
    assert "leaves out 2 parameters that not all ranks have used alike" in two.errors


def test_ranks_that_step_together_from_now_on_begin_from_the_mean(two):
    assert two.agreed("other_settings") == {
        "claims": [False, False, "all"],
        "errors": [0.0, 0.0, 0.0],
        "anchor of diloco": ["anchor", "momentum"],
        "together": True,
    }


def test_averaging_among_all_ranks_is_said_to_save_nothing(two):
    assert two.agreed("one_host") == {
        "scopes": ["all", "node", "node", "node"],
        "equal": True,
        "claims": [False, False],
        "bytes": 0,
    }
    assert two.errors.count("and nothing is saved") == 1
