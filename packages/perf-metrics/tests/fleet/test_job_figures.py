import pytest

from perf_metrics import FleetSamples
from perf_metrics.fleet.job_figures import DeviceFigures, JobFigures, job_figures, odd_devices, spread
from perf_metrics.fleet.regressions import JobLevel, slower_than_earlier_jobs
from perf_metrics.ofu.samples import Device


def figures_of(samples: list[tuple[str, float, float | None, float | None]]) -> JobFigures:
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for gpu, time_s, activity, mhz in samples:
        fleet.add("job", Device("node", gpu), time_s, activity, mhz)
    return job_figures("job", fleet.jobs["job"], fleet.start, fleet.end, fleet.step_s)


def test_activity_and_clock_are_multiplied_for_each_sample() -> None:
    figures = figures_of([("0", 600, 1.0, 500), ("0", 630, 0.2, 1000), ("1", 600, 0.4, 1000)])
    assert figures.ofu is not None
    assert figures.ofu.mean == pytest.approx((0.5 + 0.2 + 0.4) / 3)
    assert figures.times == (600, 630)
    assert figures.series == pytest.approx((0.45, 0.2))
    assert figures.counts == (2, 1)
    first, second = figures.devices
    assert (first.device, first.tensor_activity, first.sm_mhz) == (Device("node", "0"), 0.6, 750)
    assert figures.imbalance == pytest.approx((0.4 - 0.35) / 0.375)
    assert (first.ofu, second.ofu) == pytest.approx((0.35, 0.4))
    assert not figures.cut


def test_samples_without_a_figure_are_counted() -> None:
    figures = figures_of([("0", 0, None, 500), ("0", 30, 0.5, None)])
    assert (figures.samples, figures.left_out, figures.ofu, figures.imbalance) == (0, 2, None, None)


def test_a_device_of_a_few_minutes_is_not_judged_and_hours_are_those_of_samples() -> None:
    swapped = [("0", 30.0 * step, 0.01, 1000.0) for step in range(6)]
    rest = [(gpu, 30.0 * step, 0.4, 1000.0) for gpu in "1234" for step in range(120)]
    figures = figures_of([*swapped, *rest])
    assert (len(figures.devices), figures.usual_devices) == (5, 4)
    assert figures.odd_devices == ()
    assert figures.imbalance == pytest.approx(0)
    assert figures.interval_s == 30
    assert figures.device_hours == pytest.approx((6 + 4 * 120) * 30 / 3600)


def test_a_job_at_an_end_of_the_range_may_be_longer() -> None:
    assert figures_of([("0", 0, 0.5, 500)]).cut
    assert figures_of([("0", 3600, 0.5, 500)]).cut


def test_a_device_whose_tensor_clock_is_not_known_gives_no_ofu() -> None:
    fleet = FleetSamples(start=0, end=60, step_s=30)
    fleet.add("job", Device(model="NVIDIA H100 80GB HBM3"), 0, 0.5, 1830)
    fleet.add("job", Device(model="Abacus 9000"), 0, 0.5, 1830)
    figures = job_figures("job", fleet.jobs["job"], 0, 60, 30)
    assert figures.ofu is not None
    assert figures.ofu.mean == pytest.approx(0.5)
    assert figures.left_out == 1
    assert fleet.unknown_models == {"Abacus 9000": 1}


def test_percentiles_lie_on_the_line_between_neighbours() -> None:
    found = spread([0.4, 0.1, 0.2, 0.3, 0.0])
    assert found is not None
    assert (found.p10, found.p50, found.p90) == pytest.approx((0.04, 0.2, 0.36))
    assert spread([]) is None


def test_a_straggler_is_told_from_a_device_with_less_work() -> None:
    def device(index: int, *figures: float, model: str = "H100") -> DeviceFigures:
        return DeviceFigures(Device(index=str(index), model=model), *figures, samples=100, seconds=3000)

    usual = [device(index, 0.37, 0.50, 1350) for index in range(4)]
    straggler, idle = device(4, 0.37, 0.69, 980), device(5, 0.10, 0.14, 1360)
    others = [device(index, 0.37, 0.69, 980, model="A100") for index in range(6, 9)]
    found = odd_devices([*usual, straggler, idle])
    assert [(one.kind, one.figures) for one in found] == [("slow clock", straggler), ("less work", idle)]
    # Another model has other clocks, and of two it cannot be told which is odd.
    assert odd_devices([*usual, *others]) == []
    assert odd_devices([straggler, idle]) == []


def test_a_job_is_held_against_earlier_ones_of_its_run_and_size() -> None:
    def level(job: str, ofu: float, start: float, run: str = "run", gpus: int = 64) -> JobLevel:
        return JobLevel(job, run, gpus, start, ofu)

    past = [level("a", 0.40, 1), level("b", 0.41, 2), level("c", 0.39, 3)]
    others = [level("small", 0.2, 5, gpus=8), level("other", 0.2, 5, run="other")]
    (found,) = slower_than_earlier_jobs([level("d", 0.30, 4), *others, *past])
    assert (found.job, found.before, found.after) == ("d", 0.40, 0.30)
    assert found.fall == pytest.approx(0.25)
    # A twentieth is none; and where the past is uneven, neither is a fifth.
    assert not list(slower_than_earlier_jobs([*past, level("d", 0.38, 4)]))
    uneven = [level("a", 0.30, 1), level("b", 0.40, 2), level("c", 0.50, 3), level("d", 0.32, 4)]
    assert not list(slower_than_earlier_jobs(uneven))
