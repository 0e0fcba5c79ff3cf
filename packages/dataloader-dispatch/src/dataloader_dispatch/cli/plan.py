"""What a run of ``tokenize`` is to make of what, so that a later run can go on with it or refuse to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import FileRange

_DOCUMENTS_A_PART = 1_000_000
_NAMED_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file.

    Attributes:
        name: Path below what was given as input.
        size: Bytes.
        documents: Number of documents; 0 also if the file was left out.
        modified: Time of the last change in ns; None where it is not known any more.
    """

    name: str
    size: int
    documents: int
    modified: int | None


class Chunk(NamedTuple):
    """Documents that make a part: numbers ``start`` up to, not including, ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings and input that decide what is written. The number of workers is not among them.

    Attributes:
        settings: Value of each setting.
        sources: The input files, in order.
    """

    settings: Mapping[str, str | int]
    sources: tuple[SourceFile, ...]

    def to_json(self) -> str:
        """The text of ``plan.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_values(cls, settings: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan in a file.

        Raises:
            KeyError: Something is missing or of another type.
        """
        try:
            files = [(one["name"], one["size"], one["documents"], one.get("modified")) for one in sources]
            return cls(dict(settings), tuple(SourceFile(*values) for values in files))
        except (AttributeError, TypeError, ValueError) as error:
            raise KeyError(f"of the right type: {error}") from error

    def differences(self, now: Plan) -> list[str]:
        """What is different in ``now``, in words."""
        found = [
            f"{name} was {self.settings.get(name)!r} and is {now.settings.get(name)!r}"
            for name in sorted({*self.settings, *now.settings})
            if self.settings.get(name) != now.settings.get(name)
        ]
        found += _changed_files(self.sources, now.sources)
        more = len(found) - _NAMED_DIFFERENCES
        return found[:_NAMED_DIFFERENCES] + ([f"and {more} more differences"] if more > 0 else [])


def read_plan(path: Path) -> Plan | None:
    """The plan in a file, None if there is no such file.

    Raises:
        DataError: The file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Plan.from_values(content["settings"], content["sources"])
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); begin anew with --overwrite") from error


def source_files(ranges: Sequence[FileRange]) -> tuple[SourceFile, ...]:
    """The input files, as they are now."""
    return tuple(
        SourceFile(file.name, file.size, file.stop - file.start, _modified(file.path)) for file in ranges
    )


def cut_chunks(ranges: Sequence[FileRange], part_size: int) -> list[Chunk]:
    """Cut the documents into parts of about the same number of bytes in the input files.

    Args:
        ranges: The files.
        part_size: Bytes a part, about; documents are not cut.
    """
    chunks: list[Chunk] = []
    start, filled = 0, 0
    for file in ranges:
        count, at = file.stop - file.start, file.start
        while at < file.stop:
            # Rounded up, so that a document larger than what is left still comes.
            room = -(-(part_size - filled) * count // max(file.size, 1))
            taken = min(file.stop - at, room, _DOCUMENTS_A_PART - (at - start))
            at += taken
            filled += taken * file.size // count
            if filled >= part_size or at - start == _DOCUMENTS_A_PART:
                chunks.append(Chunk(start, at))
                start, filled = at, 0
    stop = ranges[-1].stop
    return [*chunks, Chunk(start, stop)] if start < stop else chunks


def _modified(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None  # it was left out, or goes missing, which is found when it is read


def _changed_files(before: Sequence[SourceFile], now: Sequence[SourceFile]) -> list[str]:
    old, new = _by_name(before), _by_name(now)
    found = [f"input {name} is gone" for name, count in old if (name, count) not in new]
    found += [f"input {name} is new" for name, count in new if (name, count) not in old]
    for name, count in old.keys() & new.keys():
        one, other = old[name, count], new[name, count]
        if one.size != other.size:
            found.append(f"input {name} had {one.size} bytes and has {other.size}")
        elif one.documents != other.documents:
            found.append(f"input {name} had {one.documents} readable documents and has {other.documents}")
        elif None not in (one.modified, other.modified) and one.modified != other.modified:
            found.append(f"input {name} was changed in the meantime")
    if not found and [file.name for file in before] != [file.name for file in now]:
        found.append("the input files come in another order")
    return sorted(found)


def _by_name(files: Sequence[SourceFile]) -> dict[tuple[str, int], SourceFile]:
    """Files by name, and by their number among those of that name below different inputs."""
    seen: Counter[str] = Counter()
    found = {}
    for file in files:
        found[file.name, seen[file.name]] = file
        seen[file.name] += 1
    return found
