import time

import pytest

from perf_metrics import ThroughputMeter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> ThroughputMeter:
    return ThroughputMeter(clock)


def test_excluded_phases_leave_the_net_time_and_measured_ones_stay(
    meter: ThroughputMeter, clock: Clock
) -> None:
    clock.sleep(1)
    with meter.measure("data_wait"):
        clock.sleep(2)
    with meter.exclude("evaluation"):
        clock.sleep(4)
    clock.sleep(8)
    lap = meter.lap()
    assert (lap.gross_seconds, lap.net_seconds) == (15, 11)
    assert dict(lap.phases) == {"data_wait": 2, "evaluation": 4}
    assert lap.share("data_wait") == pytest.approx(2 / 11)
    assert lap.share("never") == 0
    assert lap.per_second(22) == 2


def test_windows_follow_one_another_without_a_gap(meter: ThroughputMeter, clock: Clock) -> None:
    clock.sleep(3)
    meter.lap()
    clock.sleep(5)
    lap = meter.lap()
    assert (lap.gross_seconds, lap.net_seconds, dict(lap.phases)) == (5, 5, {})


def test_nested_phases_are_subtracted_once(meter: ThroughputMeter, clock: Clock) -> None:
    with meter.exclude("evaluation"):
        clock.sleep(1)
        with meter.exclude("saving"):
            clock.sleep(2)
        with meter.measure("data_wait"):
            clock.sleep(4)
    with meter.measure("data_wait"):
        clock.sleep(8)
        with meter.exclude("saving"):
            clock.sleep(16)
    lap = meter.lap()
    assert dict(lap.phases) == {"evaluation": 5, "saving": 18, "data_wait": 8}
    assert (lap.gross_seconds, lap.net_seconds) == (31, 8)


def test_a_phase_open_at_the_lap_is_split(meter: ThroughputMeter, clock: Clock) -> None:
    with meter.exclude("saving"):
        clock.sleep(2)
        first = meter.lap()
        clock.sleep(3)
    clock.sleep(1)
    second = meter.lap()
    assert (first.net_seconds, dict(first.phases)) == (0, {"saving": 2})
    assert (second.net_seconds, dict(second.phases)) == (1, {"saving": 3})
    assert first.per_second(10) is None
    assert first.share("data_wait") is None


def test_start_forgets_the_window(meter: ThroughputMeter, clock: Clock) -> None:
    with meter.exclude("warm_up"):
        clock.sleep(7)
    meter.start()
    clock.sleep(2)
    lap = meter.lap()
    assert (lap.gross_seconds, dict(lap.phases)) == (2, {})


def test_a_phase_that_fails_is_closed(meter: ThroughputMeter, clock: Clock) -> None:
    def failing_save() -> None:
        with meter.exclude("saving"):
            clock.sleep(2)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        failing_save()
    clock.sleep(3)
    assert meter.lap().net_seconds == 3


def test_one_name_is_for_one_kind(meter: ThroughputMeter) -> None:
    with meter.measure("data_wait"):
        pass
    with pytest.raises(ValueError, match=r"'data_wait' was measured before and cannot be excluded"):
        meter.exclude("data_wait")
    with meter.exclude("saving"):
        pass
    with pytest.raises(ValueError, match=r"'saving' was excluded before and cannot be measured"):
        meter.measure("saving")


def test_the_real_clock() -> None:
    meter = ThroughputMeter()
    with meter.exclude("sleep"):
        time.sleep(0.05)
    lap = meter.lap()
    assert lap.phases["sleep"] >= 0.05
    assert lap.net_seconds < lap.gross_seconds
    assert lap.gross_seconds - lap.net_seconds == pytest.approx(lap.phases["sleep"])
