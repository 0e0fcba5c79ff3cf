"""Real SQLite files with the tables and columns of `nsys export --type sqlite`."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

from perf_metrics.ofu.counter_files import NSYS_CLOCK, NSYS_TENSOR, read_nsys
from perf_metrics.ofu.samples import mean_ofu_by_device

START = 1_700_000_000_000_000_000
TYPE = 0x0001_0000_0000_0000  # above the low byte stands the virtual machine
NAMES = {7: "SMs Active [Throughput %]", 8: NSYS_TENSOR, 0: NSYS_CLOCK}
Row = tuple[int, int, int, float]


def export(path: Path, rows: Iterable[Row], names: dict[int, str] = NAMES, start: int | None = START) -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            """
            CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER NOT NULL,
                metricId INTEGER NOT NULL, value INTEGER NOT NULL);
            CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER NOT NULL, sourceId INTEGER NOT NULL,
                typeName TEXT NOT NULL, metricId INTEGER NOT NULL, metricName TEXT NOT NULL);
            CREATE TABLE TARGET_INFO_GPU (id INTEGER, uuid TEXT);
            INSERT INTO TARGET_INFO_GPU VALUES (0, 'GPU-a'), (1, 'GPU-b');
            """
        )
        if start is not None:
            database.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
            database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (start,))
        database.executemany(
            "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, 0, 'GPU Metrics', ?, ?)",
            # Twice, as with two sources: the join must not double the rows.
            [(TYPE + gpu, number, name) for gpu in (0, 1) for number, name in names.items()] * 2,
        )
        database.executemany("INSERT INTO GPU_METRICS VALUES (?, ?, ?, ?)", rows)
        database.commit()
    return path


def rows(gpu: int, *readings: tuple[int, int, int]) -> list[Row]:
    return [
        (time, TYPE + gpu, number, value)
        for time, percent, hertz in readings
        for number, value in ((7, 99), (8, percent), (0, hertz))
    ]


def test_percent_and_hertz_of_two_gpus(tmp_path: Path) -> None:
    data = rows(1, (100, 40, 1_710_000_000), (200, 60, 1_200_000_000)) + rows(0, (100, 90, 1_830_000_000))
    readings = read_nsys(export(tmp_path / "a.sqlite", data), host="node1")
    assert readings.notes == ()
    assert [(str(s.device), s.device.uuid, s.tensor_activity, s.sm_mhz) for s in readings.samples] == [
        ("node1, GPU 0", "GPU-a", 0.9, 1830.0),
        ("node1, GPU 1", "GPU-b", 0.4, 1710.0),
        ("node1, GPU 1", "GPU-b", 0.6, 1200.0),
    ]
    assert readings.samples[2].time_s == pytest.approx(START / 1e9 + 200e-9)
    zero, one = mean_ofu_by_device(readings.samples, 1830.0).values()
    assert (zero.ofu, one.ofu) == (pytest.approx(0.9), pytest.approx((0.4 * 1710 + 0.6 * 1200) / 2 / 1830))


def test_a_window_of_a_capture_without_wall_time(tmp_path: Path) -> None:
    data = rows(0, *((number * 10**9, 10 * number, 1_830_000_000) for number in range(5)))
    path = export(tmp_path / "a.sqlite", data, start=None)
    readings = read_nsys(path, from_s=1.0, until_s=3.0)
    assert [(s.time_s, s.tensor_activity) for s in readings.samples] == [(1.0, 0.1), (2.0, 0.2)]
    assert readings.notes == (
        "the wall time of the capture is not in the file: times are seconds since its start",
    )
    assert read_nsys(path, from_s=9.0).notes[-1] == "there are no samples in the window"


def test_missing_metrics_and_similar_names_are_said(tmp_path: Path) -> None:
    names = {8: "Tensor Active / FP16 Active [Throughput %]", 1: "SYS Clock Frequency [MHz]"}
    data = [(100, TYPE, 8, 50), (100, TYPE, 1, 1_500_000_000)]
    readings = read_nsys(export(tmp_path / "a.sqlite", data, names))
    assert readings.samples == ()
    assert readings.notes[:2] == (
        f"no metric {NSYS_TENSOR!r}; there is Tensor Active / FP16 Active [Throughput %], not used",
        f"no metric {NSYS_CLOCK!r}; there is SYS Clock Frequency [MHz], not used",
    )
    only_tensor = read_nsys(export(tmp_path / "b.sqlite", [(100, TYPE, 8, 50)], {8: NSYS_TENSOR}))
    assert (only_tensor.samples[0].tensor_activity, only_tensor.samples[0].sm_mhz) == (0.5, None)
    (mean,) = mean_ofu_by_device(only_tensor.samples, 1830.0).values()
    assert (mean.ofu, mean.reason) == (None, "1 of 1 samples lack the SM clock")


def test_a_gpu_without_the_metric_is_named(tmp_path: Path) -> None:
    path = export(tmp_path / "a.sqlite", rows(0, (100, 50, 1_710_000_000)))
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM TARGET_INFO_GPU_METRICS WHERE metricId = 8 AND typeId = ?", (TYPE + 1,))
        database.commit()
    readings = read_nsys(path)
    assert len(readings.samples) == 1
    assert readings.notes == (
        f"GPU 1: no metric {NSYS_TENSOR!r}; Profile with `nsys profile --gpu-metrics-devices=all` and "
        "`nsys export --type sqlite`",
    )


def test_values_of_another_unit_are_left_out(tmp_path: Path) -> None:
    data = rows(0, (100, 50, 1710), (200, -1, 1_710_000_000), (300, 101, 0), (400, 5710, 1_710_000_000))
    readings = read_nsys(export(tmp_path / "a.sqlite", data))
    assert [s.sm_mhz for s in readings.samples] == [None, 1710.0, 0.0, 1710.0]
    assert [s.tensor_activity for s in readings.samples] == [0.5, None, 1.01, None]
    assert sorted(readings.notes) == [
        f"{NSYS_CLOCK}: 1 of 4 values are not a clock in Hz and were left out",
        f"{NSYS_TENSOR}: 2 of 4 values are not 0 to 100 % and were left out",
    ]


def test_files_that_are_no_such_export(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_nsys(tmp_path / "none.sqlite")
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match="cannot be read as an export of Nsight Systems"):
        read_nsys(report)
    empty = tmp_path / "empty.sqlite"
    with closing(sqlite3.connect(empty)) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    with pytest.raises(
        ValueError, match=r"no table GPU_METRICS and TARGET_INFO_GPU_METRICS\. Profile with `nsys"
    ):
        read_nsys(empty)


def test_the_file_is_not_written_to(tmp_path: Path) -> None:
    path = export(tmp_path / "a b#.sqlite", rows(0, (1, 2, 3)))
    before = path.read_bytes()
    read_nsys(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
