import math

import pytest

from perf_metrics import Application, FleetSamples, fleet_report
from perf_metrics.fleet.job_figures import (
    DeviceFigures,
    JobFigures,
    cells,
    job_figures,
    odd_devices,
    seconds_of,
    spread,
    weighted_percentiles,
)
from perf_metrics.fleet.job_samples import JobSamples, RunLabels
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
    assert figures.gpu_seconds == pytest.approx((60, 30))
    first, second = figures.devices
    assert (first.device, first.tensor_activity, first.sm_mhz) == (Device("node", "0"), 0.6, 750)
    # Held against the job at the same times: 0.45 while both had it, 0.2 after, 1.1 / 3 over all.
    alike = 0.35 * (1.1 / 3) / 0.325, 0.4 * (1.1 / 3) / 0.45
    assert figures.imbalance == pytest.approx((alike[0] - alike[1]) / (sum(alike) / 2))
    assert (first.ofu, second.ofu) == pytest.approx((0.35, 0.4))
    assert not figures.cut


def test_samples_without_a_figure_are_counted() -> None:
    figures = figures_of([("0", 0, None, 500), ("0", 30, 0.5, None)])
    assert (figures.samples, figures.left_out, figures.ofu, figures.imbalance) == (0, 2, None, None)


def test_a_device_of_a_few_minutes_is_not_judged_and_hours_are_those_of_samples() -> None:
    swapped = [("0", 30.0 * step, 0.01, 1000.0) for step in range(6)]
    rest = [(gpu, 30.0 * step, 0.4, 1000.0) for gpu in "1234" for step in range(120)]
    figures = figures_of([*swapped, *rest])
    assert (len(figures.devices), figures.gpus) == (5, 4)
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
    found = spread([0.4, 0.1, 0.2, 0.3, 0.0], [30.0] * 5)
    assert found is not None
    assert (found.p10, found.p50, found.p90) == pytest.approx((0.04, 0.2, 0.36))
    assert spread([], []) is None


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


def requeued(fleet: FleetSamples, levels: tuple[float, ...], wait_s: float = 600.0) -> None:
    """A job of 8 GPUs, again and again on another node for an hour each."""
    for number, level in enumerate(levels):
        for index in range(8):
            device = Device(f"node-{number}", str(index), f"GPU-{number}-{index}")
            for step in range(120):
                fleet.add("job", device, 30 + number * (3600 + wait_s) + 30 * step, level, 1000)


def test_a_job_that_was_queued_again_has_its_gpus_at_a_time_and_its_fall() -> None:
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    requeued(fleet, (0.40, 0.20))
    report = fleet_report(fleet)
    (job,) = report.jobs
    assert (job.figures.job, job.gpus, len(job.figures.devices), report.devices) == ("job", 8, 16, 16)
    (fall,) = report.regressions
    assert (fall.before, fall.after, fall.time_s) == (pytest.approx(0.4), pytest.approx(0.2), 30 + 4200)
    assert fall.lost_gpus == pytest.approx(8 * 0.2)
    # The later devices do less than the earlier ones, and no less than the job at that time.
    assert job.figures.odd_devices == ()
    assert job.figures.imbalance == pytest.approx(0)
    assert job.figures.device_hours == pytest.approx(16)


def test_a_name_that_is_used_again_is_another_job() -> None:
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    requeued(fleet, (0.40, 0.20), wait_s=3700)
    report = fleet_report(fleet, {"job": Application(0.4), "job#2": Application(0.2)})
    assert [job.figures.job for job in report.jobs] == ["job#1", "job#2"]
    assert [job.figures.ofu.mean for job in report.jobs if job.figures.ofu] == pytest.approx([0.4, 0.2])
    assert report.regressions == ()
    assert [job.application.mfu for job in report.jobs] == [None, 0.2]
    assert "1 names stand for several jobs, told apart by gaps of more than 60 minutes" in report.notes[0]
    assert "MFU of 1 names is not used, as each stands for several jobs: job; name the job" in report.notes[1]
    longer = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000, run_gap_s=7200)
    requeued(longer, (0.40, 0.20), wait_s=3700)
    assert [job.figures.job for job in fleet_report(longer).jobs] == ["job"]
    with pytest.raises(ValueError, match="run_gap_s=0 must be a positive number of seconds"):
        FleetSamples(start=0, end=60, step_s=30, run_gap_s=0)


def labelled(*runs: tuple[RunLabels, str, range]) -> list[tuple[int, int]]:
    """Number of samples and of devices of each run of one name, by labels, GPU and steps of 30 s."""
    fleet = FleetSamples(start=0, end=86400, step_s=30, tensor_mhz=1000)
    for labels, uuid, steps in runs:
        for step in steps:
            fleet.add("job", Device(uuid=uuid), 30.0 * step, 0.5, 1000, labels)
    jobs = fleet_report(fleet).jobs
    return [(job.figures.samples, len(job.figures.devices)) for job in jobs]


def test_labels_part_runs_of_one_name() -> None:
    here, there, spaced = (("cluster", "a"),), (("cluster", "b"),), (("namespace", "x"),)
    other = (("namespace", "y"),)
    assert labelled((here, "1", range(100)), (there, "2", range(50, 110))) == [(100, 1), (60, 1)]
    # A label that comes with a new configuration is no other run.
    assert labelled(((), "1", range(50)), (here, "1", range(50, 100))) == [(100, 1)]
    assert labelled((here, "1", range(50)), ((*here, *spaced), "2", range(50, 100))) == [(100, 2)]
    # A GPU is in one cluster; two pods of one name may share it.
    assert labelled((here, "1", range(60)), (there, "1", range(40, 100))) == [(100, 1)]
    assert labelled((here, "1", range(40)), (there, "1", range(60, 100))) == [(40, 1), (40, 1)]
    assert labelled((spaced, "1", range(60)), (other, "1", range(40, 100))) == [(60, 1), (60, 1)]


def test_a_gpu_is_its_uuid_and_a_sample_of_a_time_counts_once() -> None:
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for step in range(100):
        for host in ("node", "node.cluster") if step < 60 else ("node.cluster",):
            fleet.add("job", Device(host, "0", "GPU-1"), 30.0 * step, None if host == "node" else 0.5, 1000)
    report = fleet_report(fleet)
    (device,) = report.jobs[0].figures.devices
    assert (device.device.host, device.samples, device.ofu) == ("node.cluster", 100, 0.5)
    assert (report.jobs[0].gpus, report.jobs[0].figures.left_out) == (1, 0)
    # Out of order, and without a UUID.
    late = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for time_s, activity in (
        (60, 0.5),
        (30, 0.25),
        (60, 0.75),
        (30, None),
        (90, None),
        (45, None),
        (90, None),
    ):
        late.add("job", Device("node", "0"), time_s, activity, 1000)
    (kept,) = late.jobs["job"].devices.values()
    assert (list(kept.times), list(kept.activity), list(kept.unused)) == ([30, 60], [0.25, 0.5], [45, 90])


def test_a_gpu_without_a_figure_counts_in_the_size_of_its_job() -> None:
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for step in range(60):
        for index in range(8):
            fleet.add("job", Device("node", str(index)), 30.0 * step, 0.5, None if index == 3 else 1000)
    (job,) = fleet_report(fleet).jobs
    assert (job.gpus, len(job.figures.devices), job.figures.left_out) == (8, 7, 60)


def test_a_mean_is_over_gpu_time_and_not_over_samples() -> None:
    """Scraped every 30 s at 20 %, and every 2 minutes at 60 %: 40 %, where samples say 28 %."""
    fleet = FleetSamples(start=0, end=7200, step_s=30, tensor_mhz=1000)
    for step in range(1, 121):
        fleet.add("fast", Device("node", "0"), 30.0 * step, 0.2, 1000)
        fleet.add("both", Device("node", "1"), 30.0 * step, 0.2, 1000)
        if step % 4 == 0:
            fleet.add("slow", Device("node", "2"), 30.0 * step, 0.6, 1000)
            fleet.add("both", Device("node", "3"), 30.0 * step, 0.6, 1000)
    report = fleet_report(fleet)
    assert report.ofu_mean == pytest.approx(0.4)
    assert report.device_hours == pytest.approx(4)
    (both,) = (job.figures for job in report.jobs if job.figures.job == "both")
    assert both.ofu is not None
    assert (both.ofu.mean, both.gpus) == (pytest.approx(0.4), 2)
    assert (both.ofu.p10, both.ofu.p90) == pytest.approx((0.2, 0.6))
    # Between two scrapes of the slow one it is still there.
    assert both.series == pytest.approx([0.4] * 120)
    assert both.gpu_seconds == pytest.approx([60] * 120)


def test_what_jobs_share_of_a_gpu_counts_once_for_the_fleet() -> None:
    fleet = FleetSamples(start=0, end=7200, step_s=30, tensor_mhz=1000)
    for job, steps in (("a", range(1, 81)), ("b", range(61, 121))):
        for step in steps:
            fleet.add(job, Device("node", "0"), 30.0 * step, 0.2 if step <= 80 else 0.6, 1000)
    report = fleet_report(fleet)
    assert (report.devices, report.device_hours) == (1, pytest.approx(1))
    assert report.ofu_mean == pytest.approx((80 * 0.2 + 40 * 0.6) / 120)


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("model", "mhz", "activity", "wrong"),
    [
        (H100, 1980, 0.5, None),
        (H100, 2010, 0.5, "above the 2000 MHz that NVIDIA H100 80GB HBM3 reaches"),
        (H100, 1_830_000, 0.0001, "above the 2000 MHz that NVIDIA H100 80GB HBM3 reaches"),
        (None, 4999, 0.1, None),
        (None, 1_830_000, 0.0001, "above 5000 MHz; is it in MHz?"),
        ("NVIDIA GeForce RTX 4090", 3105, 0.5, None),
        (H100, 1.83, 0.5, "below 30 MHz while the GPU works"),
        (H100, 0, 0, None),
        (H100, 30, 0.5, None),
        (H100, 1830, 1.0, None),
        (H100, 1831, 1.0, "an OFU above 100 %"),
        (H100, 1000, 1.005, None),
        (H100, 1000, 45.0, "a tensor activity above 1; is it in percent?"),
    ],
)
def test_what_cannot_be_true_is_refused_and_counted(
    model: str | None, mhz: float, activity: float, wrong: str | None
) -> None:
    fleet = FleetSamples(start=0, end=60, step_s=30, tensor_mhz=None if model else 1830)
    fleet.add("job", Device("node", "0", model=model), 30, 0.5, 915)
    for uuid in ("x", "y"):
        fleet.add("job", Device("node", uuid=uuid, model=model), 30, activity, mhz)
    (kept,) = (device for device in fleet.jobs["job"].devices.values() if device.device.uuid == "x")
    assert (len(kept.times), len(kept.unused)) == ((1, 0) if wrong is None else (0, 1))
    assert [(one.samples, list(one.jobs)) for one in fleet.refused.values()] == [(2, ["job"])] * bool(wrong)
    notes = fleet_report(fleet).notes
    assert [wrong in note for note in notes] == [True] * (wrong is not None)
    assert fleet.jobs["job"].left_out == 2 * (wrong is not None)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([], [7]),
        ([50], [7, 7]),
        ([5, 5, 5], [7, 5, 5, 5]),
        ([30] * 6, [30] * 7),
        ([30, 30, 60, 30, 30, 30], [30] * 7),
        ([60] * 6 + [900] + [30] * 6, [60] * 7 + [30] * 7),
        ([30] * 6 + [900] + [60] * 6, [30] * 7 + [60] * 7),
        ([30] * 6 + [120] * 6, [30] * 7 + [120] * 6),
        ([15, 45, 30, 30, 15, 45, 30], [30] * 8),
        ([30] * 5 + [900], [30] * 7),
    ],
)
def test_seconds_that_samples_stand_for(gaps: list[float], expected: list[float]) -> None:
    times = [100.0, *(100.0 + sum(gaps[: place + 1]) for place in range(len(gaps)))]
    assert list(seconds_of(times, 7)) == expected


def test_what_a_sample_stands_for_is_cut_at_steps() -> None:
    assert list(cells([60.0], [30.0], 0, 30)) == [(2, 0, 30)]
    assert list(cells([60.0, 90.0], [60.0, 10.0], 0, 30)) == [(1, 0, 30), (2, 0, 30), (3, 1, 10)]
    parts = list(cells([75.0], [40.0], 0, 30))
    assert [row[:2] for row in parts] == [(2, 0), (3, 0)]
    assert [row[2] for row in parts] == pytest.approx([25, 15])
    assert [step for step, _, _ in cells([60.001, 89.999], [30.0, 30.0], 0, 30)] == [2, 3]


def test_percentiles_go_by_weight() -> None:
    assert weighted_percentiles([3, 1, 2], [1, 1, 1], (0, 0.25, 0.5, 1)) == [1, 1.5, 2, 3]
    assert weighted_percentiles([7], [3], (0.1, 0.9)) == [7, 7]
    # As often as it weighs, but for the ends.
    assert weighted_percentiles([0, 1], [1, 3], (0.5,)) == [0.5]
    assert weighted_percentiles([0, 1, 2], [1, 8, 1], (0.1, 0.5, 0.9)) == pytest.approx([0.2, 1, 1.8])
    assert weighted_percentiles([1, 1, 1], [0, 0, 0], (0.5,)) == [1]


def steady(*gpus: tuple[float, float, range]) -> JobFigures:
    """A job whose GPUs have one activity and clock each, in some steps of 30 s."""
    fleet = FleetSamples(start=0, end=7200, step_s=30, tensor_mhz=2000)
    for index, (activity, mhz, steps) in enumerate(gpus):
        for step in steps:
            fleet.add("job", Device("node", str(index)), 30.0 * step, activity, mhz)
    return job_figures("job", fleet.jobs["job"], fleet.start, fleet.end, fleet.step_s)


ALL = range(2, 122)


def odd_ones(*gpus: tuple[float, float, range]) -> list[tuple[str, str | None]]:
    return [(odd.kind, odd.figures.device.index) for odd in steady(*gpus).odd_devices]


def test_odd_devices_of_a_job_are_named_with_their_own_figures() -> None:
    usual = (0.5, 1000.0, ALL)
    figures = steady(usual, usual, (0.8, 600.0, ALL), usual, (0.2, 1000.0, ALL))
    assert [(odd.kind, odd.figures) for odd in figures.odd_devices] == [
        ("slow clock", figures.devices[2]),
        ("less work", figures.devices[4]),
    ]
    # Three can be compared, two cannot.
    assert odd_ones(usual, usual, (0.2, 1000.0, ALL)) == [("less work", "2")]
    assert odd_ones(usual, (0.2, 1000.0, ALL)) == []


def test_the_limits_of_an_odd_device() -> None:
    usual = (0.5, 1000.0, ALL)
    # At nine tenths of the clock, and at more, a device is not slow; without more activity it does less.
    assert odd_ones(usual, usual, (0.6, 900.0, ALL)) == []
    assert odd_ones(usual, usual, (0.6, 899.0, ALL)) == [("slow clock", "2")]
    assert odd_ones(usual, usual, (0.5, 899.0, ALL)) == []
    assert odd_ones(usual, usual, (0.6, 1000.0, ALL)) == []
    assert odd_ones(usual, usual, (0.5, 700.0, ALL)) == [("less work", "2")]
    assert odd_ones(usual, usual, (0.4, 1000.0, ALL)) == []
    assert odd_ones(usual, usual, (0.399, 1000.0, ALL)) == [("less work", "2")]


def test_devices_with_half_the_time_of_the_longest_are_compared() -> None:
    usual = (0.5, 1000.0, ALL)
    assert odd_ones(usual, usual, usual, (0.2, 1000.0, range(2, 62))) == [("less work", "3")]
    assert odd_ones(usual, usual, usual, (0.2, 1000.0, range(2, 61))) == []


@pytest.mark.parametrize("start", [0, 1_767_225_600])
def test_a_device_that_came_a_little_later_is_compared_as_it_is(start: int) -> None:
    """Up to a tenth of the time is the start of a job on its other nodes; a fifth is a swap of nodes."""
    fleet = FleetSamples(start=start, end=start + 7200, step_s=30, tensor_mhz=1000)
    for late, name in ((6, "later"), (10, "tenth"), (24, "swapped")):
        for step in range(1, 102):
            level = 0.5 if step > 24 else 0.0
            fleet.add(name, Device("node", f"{name}-0"), start + 30.0 * step, level, 1000)
            if step > late:
                fleet.add(name, Device("node", f"{name}-1"), start + 30.0 * step, level, 1000)
    imbalance = {
        name: job_figures(name, seen, fleet.start, fleet.end, 30).imbalance
        for name, seen in fleet.jobs.items()
    }
    assert imbalance["swapped"] == pytest.approx(0)
    low = 0.5 * 77 / 101
    for name, steps in (("later", 95), ("tenth", 91)):
        high = 0.5 * 77 / steps
        assert imbalance[name] == pytest.approx((high - low) / ((high + low) / 2))


def test_devices_that_had_a_job_one_after_the_other_are_held_against_the_mean_of_their_model() -> None:
    fleet = FleetSamples(start=0, end=7200, step_s=30, tensor_mhz=1000)
    for step in range(1, 121):
        first = step <= 60
        fleet.add("job", Device("node", str(first), model="x"), 30.0 * step, 0.5 if first else 0.3, 1000)
        for index in ("a", "b"):
            fleet.add("job", Device("node", index, model="y"), 30.0 * step, 0.4, 1000)
    figures = job_figures("job", fleet.jobs["job"], fleet.start, fleet.end, fleet.step_s)
    assert figures.imbalance == pytest.approx(0)


def test_models_are_compared_among_themselves_and_times_are_too() -> None:
    """A fall with a change of nodes: neither the slower model nor the later nodes are odd."""
    fleet = FleetSamples(start=0, end=14400, step_s=30, tensor_mhz=1000)
    for half, level in ((0, 0.4), (1, 0.2)):
        for index in range(6):
            model, mhz = ("fast", 1000.0) if index < 3 else ("slow", 700.0)
            share = level * (0.5 if (half, index) == (1, 1) else 1)
            for step in range(1 + 120 * half, 121 + 120 * half):
                device = Device(f"node-{half}", str(index), model=model)
                fleet.add("job", device, 30.0 * step, share * (1 if index < 3 else 1.4), mhz)
    figures = job_figures("job", fleet.jobs["job"], fleet.start, fleet.end, fleet.step_s)
    (odd,) = figures.odd_devices
    assert (odd.kind, odd.figures.device.host, odd.figures.device.index) == ("less work", "node-1", "1")
    assert odd.figures.ofu == pytest.approx(0.1)
    assert (figures.gpus, len(figures.drops)) == (6, 1)


def test_a_job_is_cut_where_it_has_less_than_a_step_to_an_end() -> None:
    def cut(first: int, last: int) -> bool:
        fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
        for time_s in range(first, last + 1, 30):
            fleet.add("job", Device("node", "0"), time_s, 0.5, 1000)
        return job_figures("job", fleet.jobs["job"], 0, 3600, 30).cut

    long_ago = FleetSamples(start=100_000, end=103_600, step_s=30, tensor_mhz=1000)
    long_ago.add("job", Device("node", "0"), 100_010, 0.5, 1000)
    assert job_figures("job", long_ago.jobs["job"], 100_000, 103_600, 30).cut
    assert [cut(30, 3570), cut(29, 3569), cut(30, 3571 - 1), cut(60, 3600), cut(31, 3571)] == [
        False,
        True,
        False,
        True,
        True,
    ]


def test_one_sample_stands_for_a_step() -> None:
    # It is that of the other devices, where they tell it.
    beside = figures_of([("0", 600 + 60 * step, 0.5, 500) for step in range(9)] + [("1", 600, 0.5, 500)])
    assert [device.seconds for device in beside.devices] == [540, 60]
    figures = figures_of([("0", 600, 0.5, 500)])
    assert (figures.device_hours, figures.gpus, figures.gpu_seconds) == (30 / 3600, 1, (30,))
    assert math.isnan(figures.interval_s)
    assert (figures.start, figures.end, figures.times) == (600, 600, (600,))
    assert figures.imbalance is None
    empty = job_figures("job", JobSamples(), 0, 3600, 30)
    assert (empty.gpus, empty.devices, empty.ofu, empty.times, empty.cut) == (0, (), None, (), False)
    idle = steady((0.0, 1000.0, ALL), (0.0, 1000.0, range(2, 80)))
    assert idle.imbalance is None


def test_the_size_is_the_median_over_time() -> None:
    assert steady(*[(0.5, 1000.0, ALL)] * 4, *[(0.5, 1000.0, range(2, 50))] * 4).gpus == 4
    assert steady(*[(0.5, 1000.0, ALL)] * 4, *[(0.5, 1000.0, range(2, 66))] * 4).gpus == 8


def test_activity_in_percent_is_refused_even_where_it_is_below_one() -> None:
    """0.8 % is not 80 %: what is above 1 tells of which kind a device's activity is."""
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for step in range(60):
        fleet.add("job", Device("node", "0"), 30.0 * step, 45.0 if step % 3 else 0.8, 1000)
        fleet.add("job", Device("node", "1"), 30.0 * step, 1.5 if step == 7 else 0.4, 1000)
    report = fleet_report(fleet)
    assert report.ofu_mean == pytest.approx(0.4)
    assert report.jobs[0].figures.left_out == 61
    assert (
        "61 samples of 1 jobs have a tensor activity above 1; is it in percent? They are" in report.notes[0]
    )


def test_a_slow_clock_is_seen_across_a_change_of_nodes_at_any_time_of_the_clock() -> None:
    """Each half has its straggler; the second half has less work and a lower clock altogether."""
    start = 1_767_225_600
    fleet = FleetSamples(start=start, end=start + 14400, step_s=30, tensor_mhz=2000)
    for half, (activity, mhz) in enumerate(((0.4, 1400.0), (0.15, 1000.0))):
        for index in range(4):
            slow = index == 2
            for step in range(2 + 120 * half, 122 + 120 * half):
                device = Device(f"node-{half}", str(index))
                shown = (activity / 0.7, 0.7 * mhz) if slow else (activity, mhz)
                fleet.add("job", device, start + 30.0 * step, *shown)
    figures = job_figures("job", fleet.jobs["job"], fleet.start, fleet.end, fleet.step_s)
    odd = [(one.kind, one.figures.device.host, one.figures.device.index) for one in figures.odd_devices]
    assert odd == [("slow clock", "node-0", "2"), ("slow clock", "node-1", "2")]
    assert not figures.cut
    assert (figures.start, figures.times[0], figures.gpus) == (start + 60, start + 60, 4)
