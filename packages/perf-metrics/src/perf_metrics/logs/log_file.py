"""Log files: a JSON array with one entry a line, readable even when its last line was torn off."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, Union

JsonValue: TypeAlias = Union[str, int, float, bool, "list[JsonValue]", "dict[str, JsonValue]", None]
LogEntry: TypeAlias = dict[str, JsonValue]

LOG_FILENAME = "trainer_logs.json"


def load_logs(path: str | Path) -> list[LogEntry]:
    """Read the entries of a log file.

    Values are scalars or lists (one element per rank, also when there is only one rank). Of a file that is
    being written, or whose writer was killed, the complete entries are returned.

    Args:
        path: A log file, or a directory that holds `trainer_logs.json`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a log file.
    """
    path = Path(path)
    if path.is_dir():
        path = path / LOG_FILENAME
    data = path.read_bytes()
    entries, intact = parse_entries(data)
    if not intact and not entries and not b"[\n".startswith(data[:2]):
        raise ValueError(f"{path}: not a log file: expected a JSON array of objects")
    return entries


def parse_entries(data: bytes) -> tuple[list[LogEntry], bool]:
    """Return the entries of a log file, and whether it is intact.

    Of a file that is not a JSON array of objects, the entries on complete leading lines are returned.
    """
    try:
        whole = json.loads(data)
    except ValueError:
        return _complete_lines(data), False
    if isinstance(whole, list) and all(isinstance(entry, dict) for entry in whole):
        return whole, True
    return [], False


def _complete_lines(data: bytes) -> list[LogEntry]:
    opening, *lines = data.split(b"\n")
    entries: list[LogEntry] = []
    if opening.strip() != b"[":
        return entries
    for line in lines:
        try:
            entry = json.loads(line.strip().removesuffix(b","))
        except ValueError:
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
    return entries


def encode_entry(entry: Mapping[str, object]) -> bytes:
    """Return one entry as a line of JSON, with null for nan and infinities.

    Raises:
        TypeError: A value is neither plain JSON data nor an array with `tolist()`.
    """
    plain = {key: _plain(key, value) for key, value in entry.items()}
    return json.dumps(plain, allow_nan=False).encode()


def write_entries(path: Path, entries: list[LogEntry]) -> None:
    """Replace a log file by one with these entries, in one atomic step."""
    body = b",\n".join(encode_entry(entry) for entry in entries)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(b"[\n" + body + b"\n]\n" if entries else b"[]\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def append_entry(path: Path, entry: Mapping[str, object]) -> bool:
    """Append an entry in place, at a cost that does not depend on the length of the file.

    The file is valid JSON before and after; if writing fails midway (disk full), it is set back.

    Returns:
        False, with the file untouched, if its end is not the end of a log file.
    """
    line = encode_entry(entry)
    with path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 3))
        tail = file.read()
        if tail == b"[]\n":
            position, closing, addition = size - 3, b"[]\n", b"[\n" + line + b"\n]\n"
        elif tail == b"\n]\n":
            position, closing, addition = size - 3, b"\n]\n", b",\n" + line + b"\n]\n"
        else:
            return False
        try:
            file.seek(position)
            written = file.write(addition)
            if written != len(addition):
                raise OSError(f"{path}: only {written} of {len(addition)} bytes of a log entry were written")
        except BaseException:
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
