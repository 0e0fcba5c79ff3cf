"""A short scenario: every fault once, and what it comes to."""

from __future__ import annotations

import pytest
from resilience.faults import FAULTS
from resilience.layouts import FSDP2_2, LAYOUTS
from resilience.plan import make_plan
from resilience.scenario import Outcome, print_outcome, run_scenario

SEED = 3469
"""Of a plan with every trainer and every moment, in few ranks: faults of a job come to two of them."""
EPISODES = len(FAULTS)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_scenario(EPISODES, SEED, tmp_path_factory.mktemp("resilience") / "scenario", FSDP2_2)


def test_the_curve_is_that_of_the_undisturbed_run(outcome: Outcome) -> None:
    print_outcome(outcome)
    assert outcome.holds


def test_every_fault_came_and_checkpoints_were_damaged(outcome: Outcome) -> None:
    assert [result.name for result in outcome.episodes] == [*map(str, range(1, EPISODES + 1)), "end"]
    plan = make_plan(EPISODES, SEED)
    assert {episode.fault.name for episode in plan} == {fault.name for fault in FAULTS}
    assert any(result.damaged for result in outcome.episodes)
    assert {episode.moment for episode in plan} == {"starting", "step", "saving"}
    assert {episode.layout.trainer for episode in plan} == {layout.trainer for layout in LAYOUTS}


def test_a_seed_gives_one_plan() -> None:
    assert make_plan(20, 0) == make_plan(20, 0)
    assert make_plan(20, 0) != make_plan(20, 1)
    for seed in range(20):
        for before, after in zip(make_plan(20, seed), make_plan(20, seed)[1:], strict=False):
            assert before.layout != after.layout
            assert after.layout.ranks >= after.fault.least_ranks
