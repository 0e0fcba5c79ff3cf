"""The kinds of log files that can be read: ours, JSON lines, and the state file of Hugging Face's trainer."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import NamedTuple

from .log_entry import LogEntry

LOG_FILENAME = "trainer_logs.json"
STATE_FILENAME = "trainer_state.json"
_STEP_KEYS = ("global_step", "step")
_NO_ENTRY = (b"", b"[", b"]", b"[]")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Of UTF-32 first: the mark of UTF-16 is the beginning of its own."""


def find_log(path: Path) -> Path:
    """Return the log file that `path` stands for: itself, or the one in it when it is a directory.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if not path.is_dir():
        return path
    for name in (LOG_FILENAME, STATE_FILENAME):
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(f"{path}: no {LOG_FILENAME} in this directory, and no {STATE_FILENAME}")


class ParsedLog(NamedTuple):
    """Entries of a log file, and the numbers of the lines between them that could not be read."""

    entries: list[LogEntry]
    bad_lines: tuple[int, ...] = ()


def parse_any(data: bytes) -> ParsedLog | None:
    """Read a log file of any kind; each entry gets `global_step` if it has a step at all.

    Of a file that is being written, or whose writer was killed, the complete entries are returned.

    Returns:
        None if this is not a log file.
    """
    data = _as_utf8(data)
    array, intact = _parse_array(data)
    parsed: ParsedLog | None = array
    if not intact and not array.entries and not b"[\n".startswith(data[:2]):
        parsed = _parse_state_or_lines(data)
    if parsed is None:
        return None
    return parsed._replace(entries=[_with_global_step(entry) for entry in parsed.entries])


def parse_entries(data: bytes) -> tuple[list[LogEntry], bool]:
    """Return the entries of a JSON array, and whether it is intact.

    Of a file that is not a JSON array of objects, the entries on complete lines are returned.
    """
    parsed, intact = _parse_array(_as_utf8(data))
    return parsed.entries, intact


def _as_utf8(data: bytes) -> bytes:
    """Return a text in UTF-8 without a mark: shells of Windows write UTF-16 with one."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            # What is torn within a letter ends before it.
            return data.decode(name, errors="ignore").removeprefix("\ufeff").encode(errors="replace")
    return data


def _parse_array(data: bytes) -> tuple[ParsedLog, bool]:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: brackets within brackets, by thousands
        opening, *lines = data.split(b"\n")
        is_array = opening.strip() == b"["
        return (_objects_on(lines, 2) if is_array else None) or ParsedLog([]), False
    if _is_array_of_objects(whole):
        return ParsedLog(whole), True
    return ParsedLog([]), False


def _parse_state_or_lines(data: bytes) -> ParsedLog | None:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return _objects_on(data.split(b"\n"), 1)
    if not isinstance(whole, dict):
        return None
    history = whole.get("log_history")
    if isinstance(history, list) and _is_array_of_objects(history):
        return ParsedLog(history)
    # One object alone is a file of one line, if it is a log entry at all and not some settings.
    return ParsedLog([whole]) if any(key in whole for key in _STEP_KEYS) else None


def _objects_on(lines: list[bytes], first: int) -> ParsedLog | None:
    """Read one object a line; the first line tells whether it is such a file, the last one may be torn."""
    entries: list[LogEntry] = []
    bad: list[int] = []
    told = [(number, line) for number, line in enumerate(lines, start=first) if line.strip() not in _NO_ENTRY]
    for number, line in told:
        entry = _object_on(line)
        if entry is not None:
            entries.append(entry)
        elif not entries:
            return None
        else:
            bad.append(number)
    return ParsedLog(entries, tuple(number for number in bad if number != told[-1][0]))


def _is_array_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _object_on(line: bytes) -> LogEntry | None:
    try:
        entry = json.loads(line.strip().removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _with_global_step(entry: LogEntry) -> LogEntry:
    if "global_step" in entry or "step" not in entry:
        return entry
    return {"global_step": entry["step"], **entry}
