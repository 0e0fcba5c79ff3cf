"""Cycle counters of DCGM 4.6.0 in files, against a device whose true activity is known."""

from __future__ import annotations

import io
from collections.abc import Sequence
from random import Random
from statistics import fmean

import pytest

from perf_metrics.ofu.counter_files import CYCLE_NAMES, read_dmon, read_exporter
from perf_metrics.ofu.cycles import activity_from_cycles, cycle_scale
from perf_metrics.ofu.samples import Device, Sample, mean_ofu

ELAPSED, TENSOR = CYCLE_NAMES
GAUGE, CLOCK = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_SM_CLOCK"
MHZ = 1400
HEADER = "#Entity   SMCLK       TENSO       SMCELAP                 MMACACT\nID\n"


def work(seconds: int, seed: int = 0) -> list[float]:
    """Tensor activity of each second, one in five of them a pause."""
    random = Random(seed)
    return [0.05 if random.random() < 0.2 else random.uniform(0.5, 0.7) for _ in range(seconds)]


def rows(
    activity: Sequence[float],
    every: int,
    *,
    elapsed_scale: float = 1,
    tensor_scale: float = 1,
    start: float = 1e15,
) -> str:
    """Rows of dmon every so many seconds. The gauge has averaged the last of them, the counters all."""
    out, elapsed, tensor = [], start, start / 4
    for second, share in enumerate(activity, start=1):
        elapsed += MHZ * 1e6 * elapsed_scale
        tensor += MHZ * 1e6 * tensor_scale * share
        if second % every == 0:
            out.append(f"GPU 0     {MHZ:<12}{share:<12.3f}{elapsed:<24.0f}{tensor:<24.0f}\n")
    return "".join(out)


@pytest.mark.parametrize("scale", [1, 132])
def test_they_tell_the_time_between_two_rows(scale: int) -> None:
    activity = work(1210)
    text = HEADER + rows(activity, 10, elapsed_scale=scale, tensor_scale=scale)
    readings = read_dmon(io.StringIO(text))
    told = [sample.tensor_activity or 0 for sample in readings.samples]
    # The first row has no row before it; after it there are 1200 seconds in 120 rows.
    assert fmean(told[1:]) == pytest.approx(fmean(activity[10:]), abs=1e-6)
    assert told[0] == pytest.approx(activity[9], abs=1e-3)
    # The gauge of one second in ten is off by a point.
    assert abs(fmean(activity[19::10]) - fmean(activity[10:])) > 0.005
    (note,) = readings.notes
    assert note.startswith(
        "tensor activity of 120 of 121 samples is that of the cycle counters (fields 1086 / 1084)"
    )
    assert note.endswith("points: GPU 0")
    mean = mean_ofu(readings.samples[1:], 1830)
    assert mean.ofu == pytest.approx(fmean(activity[10:]) * MHZ / 1830, abs=1e-6)


@pytest.mark.parametrize(
    ("elapsed_scale", "tensor_scale"),
    [(1, 132), (132, 1), (1, 16), (132, 66)],
)
def test_counts_that_are_not_alike_are_refused(elapsed_scale: int, tensor_scale: int) -> None:
    activity = work(300)
    text = HEADER + rows(activity, 1, elapsed_scale=elapsed_scale, tensor_scale=tensor_scale)
    readings = read_dmon(io.StringIO(text))
    assert [sample.tensor_activity for sample in readings.samples] == [round(one, 3) for one in activity]
    (note,) = readings.notes
    gauge, ratio = fmean(activity[1:]), fmean(activity[1:]) * tensor_scale / elapsed_scale
    assert note == (
        f"GPU 0: cycle counters (fields 1084 and 1086) are not used: their ratio of {ratio:.4g} is not the "
        f"activity of {gauge:.4g} that the gauge tells"
    )


def test_without_the_gauge_nothing_shows_the_scale() -> None:
    text = "#Entity   SMCLK  SMCELAP  MMACACT\nID\n"
    text += "GPU 0     1410   1000  200\nGPU 0     1410   2000  700\n"
    readings = read_dmon(io.StringIO(text))
    assert [sample.tensor_activity for sample in readings.samples] == [None, None]
    assert readings.notes[0].startswith("no column TENSO: run dcgmi dmon with field 1004")
    assert readings.notes[-1].endswith("no activity gauge (field 1004) shows whether both are counted alike")
    idle = read_dmon(io.StringIO(HEADER + rows([0.01] * 20, 1, tensor_scale=2)))
    assert idle.notes[0].endswith("an activity of 1.0% (± 2.0%) does not show whether both are counted alike")


def test_a_count_that_falls_began_anew() -> None:
    activity = work(40)
    text = HEADER + rows(activity[:20], 1) + rows(activity[20:], 1, start=0)
    readings = read_dmon(io.StringIO(text))
    assert readings.notes[0].startswith("tensor activity of 38 of 40 samples is that of the cycle counters")
    assert readings.notes[1] == (
        "cycle counters began anew 1 times: those intervals are left out, and the gauge stays"
    )
    told = [sample.tensor_activity for sample in readings.samples]
    assert told == pytest.approx(activity, abs=1e-3)
    # The first rows of both parts have the three digits of the gauge.
    assert (told[0], told[20]) == (round(activity[0], 3), round(activity[20], 3))


def test_one_impossible_interval_and_one_column_alone() -> None:
    samples = [
        Sample(Device(index="0"), 0.5, MHZ, float(time), elapsed_cycles=1000.0 * time, tensor_cycles=count)
        for time, count in enumerate((0.0, 0.0, 1100.0, *range(1600, 11600, 500)))
    ]
    counted = activity_from_cycles(samples)
    assert counted.samples == tuple(samples)
    assert counted.notes[0].endswith("a ratio of 1.1 in one interval is not a share of cycles")
    alone = read_dmon(io.StringIO("#Entity SMCLK TENSO SMCELAP\nID\nGPU 0 1410 0.5 1000\n"))
    assert alone.notes == ("no column MMACACT: the cycle counters are used together, fields 1084 and 1086",)


def test_samples_are_taken_by_their_times() -> None:
    def sample(device: str, time: float, elapsed: float | None, tensor: float) -> Sample:
        return Sample(Device(index=device), 0.5, MHZ, time, elapsed_cycles=elapsed, tensor_cycles=tensor)

    counted = activity_from_cycles(
        [
            sample("0", 2.0, 2000, 1020),
            sample("1", 0.0, 500, 100),
            sample("0", 0.0, 0, 0),
            sample("1", 1.0, 700, 202),
            sample("0", 1.0, 1000, 510),
            # A count that is missing, as the time after it would be counted twice.
            sample("1", 2.0, None, 300),
            sample("1", 3.0, 1000, 400),
        ]
    )
    assert [one.tensor_activity for one in counted.samples] == [0.51, 0.5, 0.5, 0.51, 0.51, 0.5, 0.5]


def series(name: str, value: str, time: int | None = None) -> str:
    return f'{name}{{gpu="0",UUID="GPU-0",Hostname="n"}} {value}' + ("\n" if time is None else f" {time}\n")


def answer(share: float, elapsed: float, tensor: float, time: int | None = None) -> str:
    values = {GAUGE: f"{share:.6f}", CLOCK: "1400", ELAPSED: f"{elapsed:.0f}", TENSOR: f"{tensor:.0f}"}
    return "".join(series(name, text, time) for name, text in values.items())


def test_a_gauge_that_always_misses_the_pauses_is_believed() -> None:
    """In a rhythm with that of the rows it is wrong, and nothing shows that it is not the counts that are."""
    activity = [0.05 if second % 10 > 6 else 0.6 for second in range(305)]
    readings = read_dmon(io.StringIO(HEADER + rows(activity, 5)))
    assert readings.notes[0].startswith(
        "GPU 0: cycle counters (fields 1084 and 1086) are not used: their ratio"
    )


def test_answers_of_the_exporter() -> None:
    # More than DCGM's blanks of other types, 2^31 and 2^47, as cycles of 132 SMs over a day are.
    elapsed, tensor = 2e16, 9e15
    samples: list[Sample] = []
    text = ""
    for number, share in enumerate((0.4, 0.51, 0.6, 0.5)):
        # Scraped every 15 s, while the exporter reads every 30 s.
        for second in (0, 15):
            time = 30 * number + second
            one = read_exporter(answer(share, elapsed, tensor), time_s=time)
            assert one.notes == ()
            samples.extend(one.samples)
            text += answer(share, elapsed, tensor, 1000 * time)
        elapsed, tensor = elapsed + 5.544e12, tensor + 5.544e12 * (0.5, 0.61, 0.49, 0)[number]
    counted = activity_from_cycles(samples)
    expected = [0.4, 0.4, 0.5, 0.51, 0.61, 0.6, 0.49, 0.5]
    assert [one.tensor_activity for one in counted.samples] == pytest.approx(expected)
    assert [one.sm_mhz for one in counted.samples] == [1400.0] * 8
    assert counted.notes[0].startswith("tensor activity of 3 of 8 samples is that of the cycle counters")
    # All of it in one text, with times.
    together = read_exporter(text)
    assert (together.samples, together.notes) == (counted.samples, counted.notes)


def test_blanks_of_the_counts() -> None:
    text = answer(0.5, 1e15, 5e14).replace("1000000000000000", "9223372036854775794")
    readings = read_exporter(text, time_s=0.0)
    assert (readings.samples[0].elapsed_cycles, readings.samples[0].tensor_cycles) == (None, 5e14)
    assert readings.notes == (f"{ELAPSED}: 1 of 1 series are blank (not supported)",)


@pytest.mark.parametrize(
    ("growth", "sm_mhz", "gauge", "units", "expected", "reason"),
    [
        ((1.4e9, 7e8), 1400.0, 0.5, 132, (0.5, 1), None),
        ((1.4e9 * 132, 7e8 * 132), 1380.0, 0.5, 132, (0.5, 132), None),
        (
            (1.4e9 * 132, 7e8 * 132),
            1400.0,
            0.5,
            None,
            (0.5, None),
            "neither 1 nor the number of SMs, which is",
        ),
        (
            (1.4e9 * 132, 7e8 * 132),
            1400.0,
            0.5,
            148,
            (0.5, None),
            "132 counts in a cycle are neither 1 nor the 148",
        ),
        ((1.4e9, 7e8 * 132), 1400.0, 0.5, 132, (None, 1), "their ratio of 66 is not the activity of 0.5"),
        ((1.4e9, 7e8), None, 0.5, 132, (0.5, None), "without the SM clock"),
        ((0.0, 0.0), 1400.0, 0.5, 132, (None, None), "have not grown"),
    ],
)
def test_the_scale(
    growth: tuple[float, float],
    sm_mhz: float | None,
    gauge: float,
    units: int | None,
    expected: tuple[float | None, int | None],
    reason: str | None,
) -> None:
    scale = cycle_scale(*growth, 1.0, sm_mhz=sm_mhz, tensor_activity=gauge, units=units)
    assert (scale.tensor_activity, scale.counts_per_cycle) == expected
    assert (scale.reason is None) == (reason is None)
    assert (reason or "") in (scale.reason or "")
