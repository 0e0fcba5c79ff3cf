"""When each rank computes, and the share of waiting."""

import math
from itertools import pairwise

import pytest

from trainer_core import ConfigurationError
from trainer_pipeline.diagram import Bar, Timeline, simulate, textbook_bubble
from trainer_pipeline.schedules import SCHEDULES

NAMES = tuple(SCHEDULES)


def share(waiting: float, computing: float) -> float:
    return waiting / (waiting + computing)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 2), (2, 7), (3, 4), (4, 8), (8, 8), (8, 20)])
def test_plain_schedules_reach_the_textbook(name: str, p: int, m: int) -> None:
    timeline = simulate(name, p, m)
    assert timeline.makespan == 3 * (m + p - 1)
    assert timeline.busy == (3 * m,) * p
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
    assert textbook_bubble(name, p, m) == (p - 1) / (m + p - 1)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 3, 2), (2, 2, 1), (2, 4, 2), (3, 6, 3), (4, 4, 2), (4, 5, 2), (4, 10, 3), (8, 8, 2)]
)
def test_looped_schedules_reach_the_textbook(name: str, p: int, m: int, v: int) -> None:
    timeline = simulate(name, p, m, stages_per_rank=v)
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert textbook_bubble(name, p, m, v) == (p - 1) / (v * m + p - 1)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
@pytest.mark.parametrize(("p", "m", "v"), [(2, 1, 2), (4, 2, 2), (4, 3, 3), (8, 6, 2)])
def test_with_fewer_microbatches_than_ranks_looped_schedules_wait_longer(
    name: str, p: int, m: int, v: int
) -> None:
    assert simulate(name, p, m, stages_per_rank=v).bubble > (p - 1) / (v * m + p - 1)
    assert textbook_bubble(name, p, m, v) is None


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 1), (2, 6, 2), (4, 4, 1), (4, 6, 3), (8, 12, 2)])
def test_the_interleaved_zero_bubble_schedule_reaches_the_textbook(p: int, m: int, v: int) -> None:
    timeline = simulate("interleaved_zero_bubble", p, m, stages_per_rank=v)
    assert timeline.bubble == pytest.approx(share(p - 1, 3 * v * m), abs=1e-12)
    assert textbook_bubble("interleaved_zero_bubble", p, m, v) == pytest.approx(share(p - 1, 3 * v * m))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 8), (8, 15), (8, 32)])
def test_zbv_waits_only_before_its_first_and_after_its_last_pass(p: int, m: int) -> None:
    zbv = simulate("zbv", p, m)
    assert zbv.bubble_between == pytest.approx(0, abs=1e-12)
    assert zbv.bubble == pytest.approx(share(p - 1, 6 * m), abs=1e-12)
    assert textbook_bubble("zbv", p, m) is None
    plain = simulate("gpipe" if m < p else "1f1b", p, m)
    assert zbv.bubble < plain.bubble / 2
    # No more memory than 1F1B's first rank, but on every rank.
    assert zbv.peak_in_flight == (min(p, m),) * p


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 6), (8, 14)])
def test_with_fewer_than_2p_minus_1_microbatches_zbv_waits_in_between_too(p: int, m: int) -> None:
    assert simulate("zbv", p, m).bubble_between > 0.001


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_nothing_begins_before_what_it_needs(name: str, transfer: float) -> None:
    timeline = simulate(name, 3, 6, forward=1.1, backward_input=0.9, backward_weight=1.3, transfer=transfer)
    last = 3 * timeline.stages_per_rank - 1
    forward = {(bar.stage, bar.microbatch): bar for bar in timeline.bars if bar.kind == "F"}
    gradient = {(bar.stage, bar.microbatch): bar for bar in timeline.bars if bar.kind in "BI"}

    def follows(later: Bar, earlier: Bar) -> bool:
        return later.start >= earlier.end + (transfer if later.rank != earlier.rank else 0.0)

    for bar in timeline.bars:
        own, before, after = ((bar.stage + step, bar.microbatch) for step in (0, -1, 1))
        if bar.kind == "F":
            assert bar.stage == 0 or follows(bar, forward[before])
        elif bar.kind == "W":
            assert follows(bar, gradient[own])
        else:
            assert follows(bar, forward[own])
            assert bar.stage == last or follows(bar, gradient[after])
    for rank in range(3):
        bars = timeline.of_rank(rank)
        assert all(one.end <= next_.start for one, next_ in pairwise(bars))
        assert math.isclose(timeline.busy[rank], 6 * 3.3)


@pytest.mark.parametrize("name", NAMES)
def test_transfers_add_waiting_and_no_work(name: str) -> None:
    near, far = simulate(name, 4, 8), simulate(name, 4, 8, transfer=0.5)
    assert far.busy == pytest.approx(near.busy)
    assert far.bubble > near.bubble


def test_microbatches_in_flight() -> None:
    assert simulate("gpipe", 4, 8).peak_in_flight == (8, 8, 8, 8)
    assert simulate("1f1b", 4, 8).peak_in_flight == (4, 3, 2, 1)
    # Narayanan et al. 2021, section 2.2.2: interleaving keeps up to 1 + (p-1)/(p*v) times as many.
    assert simulate("interleaved_1f1b", 4, 8).peak_in_flight[0] == 4 * (1 + 3 / 8)
    assert simulate("looped_bfs", 4, 8).peak_in_flight == (8, 8, 8, 8)


def test_a_measured_timeline_may_begin_at_any_time() -> None:
    work = [
        [(0, "F", 0, 5.0, 6.0), (0, "B", 0, 10.0, 13.0)],
        [(1, "B", 0, 7.5, 10.0), (1, "F", 0, 6.0, 7.0)],
    ]
    timeline = Timeline.of_work("gpipe", work)
    assert timeline.ranks == 2
    assert timeline.microbatches == 1
    assert timeline.unit == "s"
    assert timeline.makespan == 8
    assert timeline.busy == (4, 3.5)
    assert timeline.bubble == 1 - 7.5 / 16
    assert timeline.bubble_between == 1 - 7.5 / 12
    assert [bar.kind for bar in timeline.of_rank(1)] == ["F", "B"]
    in_ms = timeline.scaled(1000, "ms")
    assert (in_ms.start, in_ms.makespan, in_ms.unit) == (0, 8000, "ms")
    assert in_ms.bubble == timeline.bubble


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ([], "at least one bar"),
        ([[(0, "F", 0, 2.0, 1.0)]], "ends before it begins"),
        ([[], [(1, "F", 0, 0.0, 1.0)]], "none of rank 0"),
        ([[(0, "X", 0, 0.0, 1.0)]], "kind='X' must be one of F, B, I, W"),
    ],
)
def test_bad_measurements(work: list[list[tuple[int, str, int, float, float]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline.of_work("gpipe", work)


@pytest.mark.parametrize("setting", ["forward", "backward_input", "backward_weight"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_times(setting: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting}=.*a pass takes time"):
        simulate("gpipe", 2, 2, **{setting: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="transfer=-1"):
        simulate("gpipe", 2, 2, transfer=-1)


def test_the_literature_says_nothing_of_other_names() -> None:
    assert textbook_bubble("dualpipe_v", 4, 8) is None
    assert textbook_bubble("my_schedule", 4, 8) is None
    assert textbook_bubble("interleaved_1f1b", 4, 8) == 3 / 19
