"""GPU metrics of Nsight Systems, from its SQLite export."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from .samples import Device, Readings, Sample, check_activity

TENSOR = "Tensor Active [Throughput %]"
CLOCK = "GPC Clock Frequency [MHz]"
_HOW = "profile with nsys profile --gpu-metrics-devices=all and nsys export --type sqlite"

_LEAST_HZ = 1e7
"""The stored clock is in Hz whatever its name says (1.71e+09 of an H100); less than 10 MHz would be MHz."""

_METRICS = """
SELECT DISTINCT typeId, metricName FROM TARGET_INFO_GPU_METRICS ORDER BY typeId
"""
_ROWS = """
SELECT m.typeId, m.timestamp,
    MAX(CASE WHEN i.metricName = :tensor THEN m.value END),
    MAX(CASE WHEN i.metricName = :clock THEN m.value END)
FROM GPU_METRICS AS m
JOIN (SELECT DISTINCT typeId, metricId, metricName FROM TARGET_INFO_GPU_METRICS
      WHERE metricName IN (:tensor, :clock)) AS i
    ON i.typeId = m.typeId AND i.metricId = m.metricId
WHERE m.timestamp >= :first AND m.timestamp < :last
GROUP BY m.typeId, m.timestamp
ORDER BY m.timestamp, m.typeId
"""


def read_nsys(
    path: str | os.PathLike[str],
    *,
    host: str | None = None,
    from_s: float | None = None,
    until_s: float | None = None,
) -> Readings:
    """Read tensor activity and clock from the SQLite export of a Nsight Systems report.

    The clock is that of the GPCs, which the SMs are part of. At 10 kHz a GPU gives 600,000 samples a minute,
    of about 200 bytes each here: choose a window in long captures.

    Args:
        path: The `.sqlite` file, which is opened read-only.
        host: Name of the node.
        from_s: Begin of the window, in seconds since the start of the capture.
        until_s: End of the window.

    Returns:
        One sample per GPU and time, with notes on what the capture lacks. A GPU is the low byte of `typeId`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not such an export, or was captured without GPU metrics.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: there is no such file")
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
        try:
            return _read(
                file, database, host, _nanoseconds(from_s, -(2**63)), _nanoseconds(until_s, 2**63 - 1)
            )
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{file}: cannot be read as an export of Nsight Systems: {error}") from error


def _read(file: Path, database: sqlite3.Connection, host: str | None, first: int, last: int) -> Readings:
    missing = {"GPU_METRICS", "TARGET_INFO_GPU_METRICS"} - _tables(database)
    if missing:
        raise ValueError(f"{file}: has no table {' and '.join(sorted(missing))}; {_HOW}")
    names: defaultdict[int, set[str]] = defaultdict(set)
    for type_id, name in database.execute(_METRICS):
        names[type_id & 0xFF].add(str(name))
    notes = list(_missing_metrics(names))
    start, uuids = _session_start(database), _uuids(database)
    if start is None:
        notes.append("the wall time of the capture is not in the file: times are seconds since its start")
    devices: dict[int, Device] = {}
    wrong: Counter[str] = Counter()
    samples = []
    query = {"tensor": TENSOR, "clock": CLOCK, "first": first, "last": last}
    for type_id, timestamp, percent, hertz in database.execute(_ROWS, query):
        gpu = type_id & 0xFF
        if gpu not in devices:
            devices[gpu] = Device(host=host, index=str(gpu), uuid=uuids.get(gpu))
        activity = None if percent is None else check_activity(percent / 100)
        clock = _megahertz(hertz)
        wrong[TENSOR] += percent is not None and activity is None
        wrong[CLOCK] += hertz is not None and clock is None
        samples.append(Sample(devices[gpu], activity, clock, ((start or 0) + timestamp) / 1e9))
    for name, count in wrong.items():
        if count:
            unit = "0 to 100 %" if name == TENSOR else "a clock in Hz"
            notes.append(f"{name}: {count} of {len(samples)} values are not {unit} and were left out")
    if not samples:
        notes.append("there are no samples in the window")
    return Readings(tuple(samples), tuple(notes))


def _nanoseconds(seconds: float | None, default: int) -> int:
    return default if seconds is None else round(seconds * 1e9)


def _megahertz(hertz: float | None) -> float | None:
    if hertz is None or not (hertz == 0 or _LEAST_HZ <= hertz < 1e11):
        return None
    return hertz / 1e6


def _missing_metrics(names: Mapping[int, set[str]]) -> Iterator[str]:
    for wanted, word in ((TENSOR, "tensor"), (CLOCK, "clock")):
        lacking = [gpu for gpu, known in names.items() if wanted not in known]
        if lacking or not names:
            near = sorted({name for gpu in lacking for name in names[gpu] if word in name.lower()})
            where = "" if len(lacking) == len(names) else f"GPU {', '.join(map(str, lacking))}: "
            rest = f"there is {', '.join(near)}, not used" if near else _HOW
            yield f"{where}no metric {wanted!r}; {rest}"


def _tables(database: sqlite3.Connection) -> set[str]:
    return {str(row[0]) for row in database.execute("SELECT name FROM sqlite_master")}


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    return {str(row[0]) for row in database.execute("SELECT name FROM pragma_table_info(?)", (table,))}


def _session_start(database: sqlite3.Connection) -> int | None:
    """Return the Unix time of timestamp 0 in nanoseconds."""
    if "utcEpochNs" not in _columns(database, "TARGET_INFO_SESSION_START_TIME"):
        return None
    row = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
    return None if row is None or row[0] is None else int(row[0])


def _uuids(database: sqlite3.Connection) -> dict[int, str]:
    if not {"id", "uuid"} <= _columns(database, "TARGET_INFO_GPU"):
        return {}
    rows = database.execute("SELECT id, uuid FROM TARGET_INFO_GPU WHERE uuid IS NOT NULL")
    return {int(number): str(uuid) for number, uuid in rows}
