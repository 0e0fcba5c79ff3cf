"""Reads log files of every supported kind, and writes a JSON array with one entry per line."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Union

JsonValue: TypeAlias = Union[str, int, float, bool, "list[JsonValue]", "dict[str, JsonValue]", None]
LogEntry: TypeAlias = dict[str, Any]


def is_training(record: Mapping[str, object]) -> bool:
    """Whether the record is of a training interval."""
    return "loss" in record


def is_evaluation(record: Mapping[str, object]) -> bool:
    """Whether the record holds the results of an evaluation."""
    return not is_training(record) and any(key.startswith("eval_") for key in record)


def is_final(record: Mapping[str, object]) -> bool:
    """Whether the record holds the final metrics.

    `transformers.Trainer` has `train_runtime` in the records of its intervals too, where it counts tokens.
    """
    return not is_training(record) and "train_runtime" in record


LOG_FILENAME = "trainer_logs.json"
STATE_FILENAME = "trainer_state.json"
_STEP_KEYS = ("global_step", "step")
_NO_ENTRY = (b"", b"[", b"]", b"[]")


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
    raise FileNotFoundError(f"{path} has no {LOG_FILENAME} and no {STATE_FILENAME}.")


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
    encoding = json.detect_encoding(data)
    if encoding == "utf-8":
        return data
    # What is torn within a letter ends before it.
    return data.decode(encoding, errors="ignore").removeprefix("\ufeff").encode(errors="replace")


def _parse_array(data: bytes) -> tuple[ParsedLog, bool]:
    whole = _json(data)
    if _is_array_of_objects(whole):
        return ParsedLog(whole), True
    opening, *lines = data.split(b"\n")
    is_torn = whole is None and opening.strip() == b"["
    return (_objects_on(lines, 2) if is_torn else None) or ParsedLog([]), False


def _parse_state_or_lines(data: bytes) -> ParsedLog | None:
    whole = _json(data)
    if whole is None:
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
        entry = _json(line.strip().removesuffix(b","))
        if isinstance(entry, dict):
            entries.append(entry)
        elif not entries:
            return None
        else:
            bad.append(number)
    return ParsedLog(entries, tuple(number for number in bad if number != told[-1][0]))


def _is_array_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _json(data: bytes) -> Any:
    """Return what a text of JSON says; None where it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # RecursionError: brackets within brackets, by thousands
        return None


def _with_global_step(entry: LogEntry) -> LogEntry:
    if "global_step" in entry or "step" not in entry:
        return entry
    return {"global_step": entry["step"], **entry}


_log = logging.getLogger("perf_metrics")

_encoder = json.JSONEncoder(allow_nan=False)


def load_logs(path: str | Path) -> list[LogEntry]:
    """Read the entries of a log file.

    The file is the JSON array that `JsonLogger` writes; JSON lines, one object a line; or the
    `trainer_state.json` of Hugging Face's `Trainer`, whose `log_history` is taken. An entry that has its step
    under "step" gets it under "global_step" as well. Values are scalars or lists (one element per rank, also
    when there is only one rank). Of a file that is being written, or whose writer was killed, the complete
    entries are returned; a line in the middle that cannot be read is left out, with a warning.

    Args:
        path: A log file, or a directory that holds `trainer_logs.json` or `trainer_state.json`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a log file.
    """
    path = find_log(Path(path))
    parsed = parse_any(path.read_bytes())
    if parsed is None:
        raise ValueError(
            f"{path} is not a log file, which is a JSON array of objects, one object a line, or a "
            "trainer_state.json with its log_history."
        )
    if parsed.bad_lines:
        numbers = ", ".join(map(str, parsed.bad_lines))
        _log.warning("%s: left out what is not a JSON object, on line %s", path, numbers)
    return parsed.entries


def encode_entry(entry: Mapping[str, object]) -> bytes:
    """Return one entry as a line of JSON, with null for nan and infinities.

    Raises:
        TypeError: A value is neither plain JSON data nor an array with `tolist()`.
    """
    try:
        return _encoder.encode(entry).encode()
    except (TypeError, ValueError):  # an array, nan or an infinity; most entries have none
        plain = {key: _plain(key, value) for key, value in entry.items()}
        return _encoder.encode(plain).encode()


def write_entries(path: Path, entries: list[LogEntry]) -> None:
    """Replace a log file by one with these entries, in one atomic step."""
    body = b",\n".join(encode_entry(entry) for entry in entries)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(b"[\n" + body + b"\n]\n" if entries else b"[]\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def append_entry(path: str | Path, entry: Mapping[str, object]) -> bool:
    """Append an entry in place, at a cost that does not depend on the length of the file.

    The file is valid JSON before and after; if writing fails midway (disk full), it is set back.

    Returns:
        False, with the file untouched, if its end is not the end of a log file.

    Raises:
        FileNotFoundError: There is no such file.
    """
    line = encode_entry(entry)
    with FileIO(path, "r+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 3))
        tail = file.read(3)
        if tail == b"[]\n":
            position, closing, addition = size - 3, b"[]\n", b"[\n" + line + b"\n]\n"
        elif tail == b"\n]\n":
            position, closing, addition = size - 3, b"\n]\n", b",\n" + line + b"\n]\n"
        else:
            return False
        try:
            file.seek(position)
            # A disk with some space left takes a part, and says what is wrong when asked to take the rest.
            while addition:
                addition = addition[file.write(addition) :]
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(path)  # a failed write does not know it
            file.seek(position)
            file.write(closing)
            file.truncate()
            raise
    return True


def _plain(key: str, value: object) -> JsonValue:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(key, element) for element in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", element) for name, element in value.items()}
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return _plain(key, tolist())
    raise TypeError(
        f"log entry {key!r} is a {type(value).__name__}, which is not JSON data. Log numbers or text."
    )
