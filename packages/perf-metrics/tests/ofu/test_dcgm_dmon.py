"""Output as DeviceMonitor.cpp of DCGM prints it: entity in 10 places, then each value in its column."""

import io
from pathlib import Path
from random import Random

import pytest

from perf_metrics.ofu.counter_files import read_dmon
from perf_metrics.ofu.samples import Device, mean_ofu, mean_ofu_by_device

HEADER = """\
#Entity   SMCLK                 TENSO       SMACT
ID                              Ratio       Ratio
"""
BLOCKS = """\
GPU 4     1410                  0.571       0.900
GPU 5     N/A                   0.250       0.400
"""


def test_two_blocks_with_the_header_repeated_between(tmp_path: Path) -> None:
    path = tmp_path / "dmon.txt"
    later = BLOCKS.replace("1410", "1830").replace("0.571", "0.200").replace("N/A ", "1200")
    path.write_text(HEADER + BLOCKS + HEADER + later)
    readings = read_dmon(path, host="node1", start_s=100.0, interval_s=0.5)
    first, no_clock, second, _ = readings.samples
    assert first.device == Device(host="node1", index="4")
    assert (first.tensor_activity, first.sm_mhz, first.time_s) == (0.571, 1410.0, 100.0)
    assert (no_clock.tensor_activity, no_clock.sm_mhz, no_clock.time_s) == (0.25, None, 100.0)
    assert (second.tensor_activity, second.sm_mhz, second.time_s) == (0.2, 1830.0, 100.5)
    assert readings.notes == ("columns not used: SMACT", "SMCLK: 1 of 4 values are N/A")
    by_device = mean_ofu_by_device(readings.samples, 1830.0)
    four, five = by_device.values()
    # Multiplied per sample: the product of the means would be 0.3412.
    assert four.ofu == pytest.approx((0.571 * 1410 / 1830 + 0.2) / 2)
    assert (five.ofu, five.samples, five.left_out) == (pytest.approx(0.25 * 1200 / 1830), 1, 1)
    assert five.reason == "1 of 2 samples lack the SM clock"


def test_slices_and_columns_in_another_order() -> None:
    text = """\
#Entity   TENSO       DVNAM                 SMCLK       NEWFIELD
ID        Ratio                             MHz
GPU 0     0.817       NVIDIA A100-SXM...    1410        7
GPU-I 0   0.987       NVIDIA A100 80GB      1410        7
GPU-CI 3  0.953       N/A                   1410        7
Switch 1  0.1         x                     1           7

dmon was stopped do to receiving a signal
"""
    readings = read_dmon(io.StringIO(text))
    assert [str(s.device) for s in readings.samples] == ["GPU 0", "GPU-I 0", "GPU-CI 3"]
    assert [s.tensor_activity for s in readings.samples] == [0.817, 0.987, 0.953]
    assert {s.sm_mhz for s in readings.samples} == {1410.0}
    assert all(s.time_s is None for s in readings.samples)
    assert readings.notes == (
        "columns not used: DVNAM, NEWFIELD",
        "there are rows of GPUs and of slices; a slice's work is in its GPU's row too: average one kind",
        "rows that are not of GPUs: Switch",
        "1 lines do not fit the header, the first: 'dmon was stopped do to receiving a signal'",
    )


def test_text_as_the_manual_shows_it_without_the_places() -> None:
    """The layout of NVIDIA's user guide: "# Entity", indented rows."""
    text = """\
    # Entity  GRACT  TENSO
          Id
        GPU 0  0.845  0.816
      GPU-I 0  0.986  0.953
      GPU-I 1  0.985
"""
    readings = read_dmon(io.StringIO(text))
    assert [s.tensor_activity for s in readings.samples] == [0.816, 0.953]
    assert readings.notes[0].startswith("no column SMCLK: run dcgmi dmon with field 100;")
    assert readings.notes[-1] == "1 lines do not fit the header, the first: 'GPU-I 1  0.985'"
    unknown = mean_ofu(readings.samples, 1830.0)
    assert (unknown.ofu, str(unknown)) == (None, "unavailable: 2 of 2 samples lack the SM clock")


def test_other_counters_do_not_stand_in_for_tensor_activity() -> None:
    text = "#Entity   SMCLK  THMMA  SMCELAP  MMACACT\nID\nGPU 0     1410   0.400  123456   2345\n"
    readings = read_dmon(io.StringIO(text))
    assert readings.samples[0].tensor_activity is None
    assert readings.notes[0] == (
        "no column TENSO: run dcgmi dmon with field 1004 (THMMA counts the half-precision pipe alone; "
        "how MMACACT is counted is not documented, and TENSO shows it)"
    )


def test_a_torn_last_line_and_impossible_values_are_left_out() -> None:
    text = HEADER + BLOCKS + "GPU 4     14"
    readings = read_dmon(io.StringIO(text))
    assert len(readings.samples) == 2
    assert readings.notes[-1] == "the last line has no end and was left out"
    wrong = read_dmon(io.StringIO(HEADER + BLOCKS.replace("0.571", "57.10").replace("1410", "<<<>")))
    assert (wrong.samples[0].tensor_activity, wrong.samples[0].sm_mhz) == (None, None)
    assert "TENSO: 1 of 2 values are not a share from 0 to 1 and were left out" in wrong.notes
    assert "SMCLK: 1 of 2 values are not a number of MHz and were left out" in wrong.notes


def test_a_block_may_lack_a_row() -> None:
    zero, one = "GPU 0     1410    0.100\n", "GPU 1     1410    0.200\n"
    text = "#Entity   SMCLK   TENSO\n" + zero + one + one + zero + one
    readings = read_dmon(io.StringIO(text), start_s=0.0, interval_s=1.0)
    assert [(s.device.index, s.time_s) for s in readings.samples] == [
        ("0", 0.0),
        ("1", 0.0),
        ("1", 1.0),
        ("0", 2.0),
        ("1", 2.0),
    ]


def test_lines_without_ends_are_whole_lines() -> None:
    assert len(read_dmon((HEADER + BLOCKS).splitlines()).samples) == 2


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no header begins with #Entity"):
        read_dmon(io.StringIO("Error: unable to connect to host engine\n"))
    with pytest.raises(ValueError, match=r"start_s=1\.0 and interval_s=None must be given together"):
        read_dmon(io.StringIO(HEADER), start_s=1.0)
    with pytest.raises(FileNotFoundError):
        read_dmon(tmp_path / "none.txt")


def test_devices_of_one_time_are_one_sample_of_the_interval() -> None:
    random = Random(0)
    rows = [f"GPU {gpu} 1000 {0.4 + random.gauss(0, 0.01):.6f}" for _ in range(40) for gpu in range(2)]
    text = "#Entity SMCLK TENSO\nID\n" + "\n".join(rows) + "\n"
    timed = read_dmon(io.StringIO(text), start_s=0.0, interval_s=30.0)
    mean = mean_ofu(timed.samples, 1000.0)
    assert (mean.samples, timed.notes) == (80, ())
    assert mean.interval is not None
    assert mean.interval.samples == 40
    assert mean.interval.mean == pytest.approx(mean.ofu)
    assert mean.interval.step_s == pytest.approx(30)
    assert str(mean) == f"{100 * (mean.ofu or 0):.1f} % (± {100 * (mean.interval.half_width or 0):.1f})"
    # Without times nobody knows which samples belong together, or in what order they are.
    assert mean_ofu(read_dmon(io.StringIO(text)).samples, 1000.0).interval is None
    rare = read_dmon(io.StringIO(text), start_s=0.0, interval_s=60.0)
    assert rare.notes[0].startswith("samples every 60 s miss time")
