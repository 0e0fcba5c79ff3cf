"""Log files: reading every kind, and writing a JSON array with one entry a line."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from .formats import LOG_FILENAME, find_log, parse_any, parse_entries
from .log_entry import JsonValue, LogEntry

__all__ = [
    "LOG_FILENAME",
    "JsonValue",
    "LogEntry",
    "append_entry",
    "encode_entry",
    "load_logs",
    "parse_entries",
    "write_entries",
]

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
            f"{path}: not a log file: expected a JSON array of objects, one object a line, or a "
            "trainer_state.json with its log_history"
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
        f"log entry {key!r} is a {type(value).__name__}, which is not JSON data; log numbers or text"
    )
