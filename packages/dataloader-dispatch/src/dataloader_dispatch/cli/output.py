"""The directory that ``tokenize`` writes: what it is made of, and how far it is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import DataFile, FileRange
from dataloader_dispatch.sources.part_writer import claim_durably, sync_directory, write_durably
from dataloader_dispatch.sources.token_binary import (
    MANIFEST,
    PART,
    UNFINISHED,
    Part,
    TokenManifest,
    TokenType,
    is_token_directory,
    read_manifest,
)

_DOCUMENTS_A_PART = 1_000_000
_NAMED_DIFFERENCES = 3
PLAN = "plan.json"
"""In the folder of what is not finished: what is to be done."""


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
        raise DataError(f"{path} is damaged ({error}). Begin anew with --overwrite.") from error


def source_files(ranges: Sequence[FileRange]) -> tuple[SourceFile, ...]:
    """The input files, as they are now."""
    return tuple(
        SourceFile(one.file.name, one.file.size, one.stop - one.start, _modified(one.file)) for one in ranges
    )


def cut_chunks(ranges: Sequence[FileRange], part_size: int) -> list[Chunk]:
    """Cut the documents into parts of about the same number of bytes in the input files.

    Args:
        ranges: The files.
        part_size: Bytes a part, about; documents are not cut.
    """
    chunks: list[Chunk] = []
    start, filled = 0, 0
    for one in ranges:
        count, at, size = one.stop - one.start, one.start, one.file.size
        while at < one.stop:
            # Rounded up, so that a document larger than what is left still comes.
            room = -(-(part_size - filled) * count // max(size, 1))
            taken = min(one.stop - at, room, _DOCUMENTS_A_PART - (at - start))
            at += taken
            filled += taken * size // count
            if filled >= part_size or at - start == _DOCUMENTS_A_PART:
                chunks.append(Chunk(start, at))
                start, filled = at, 0
    stop = ranges[-1].stop
    return [*chunks, Chunk(start, stop)] if start < stop else chunks


def _modified(file: DataFile) -> int | None:
    if file.stored is not None:
        return int(file.stored.modified * 10**9)
    try:
        return Path(file.path).stat().st_mtime_ns
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


class Standing(Enum):
    """How far a directory is."""

    NEW = auto()
    UNFINISHED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class FinishedPart:
    """What is known of a part that is on the disk.

    Attributes:
        part: Its entry in the manifest.
        text_bytes: Bytes of the text of its documents, in UTF-8.
        empty: Documents without tokens, those left out included.
        separators: Separators that stand in documents, as their text spells them.
        skipped: Documents left out as they could not be read.
        undecodable: Documents that were not UTF-8.
    """

    part: Part
    text_bytes: int
    empty: int
    separators: int
    skipped: int
    undecodable: int


class Output:
    """The directory OUT.

    Args:
        path: Where it is or will be.

    Attributes:
        can_be_forked: Whether it works in a process that is forked from one that has used it.
    """

    can_be_forked = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.scratch = path / UNFINISHED
        self._lock: int | None = None

    def __str__(self) -> str:
        return str(self.path)

    def refuse_others(self) -> None:
        """Refuse a place that this command must not write.

        Raises:
            DataError: It is not a directory, or holds something else than tokens.
        """
        if not self.path.exists() or is_token_directory(self.path):
            return
        if not self.path.is_dir():
            raise DataError(f"OUT {self.path} is not a directory. Name one, as the last of the paths.")
        others = sorted(path.name for path in self.path.iterdir() if path.name != UNFINISHED)
        if others:
            raise DataError(
                f"OUT {self.path} holds something else, {others[0]!r} for one. Name a directory that is "
                "new, empty, or was written by this command (--overwrite replaces nothing else)."
            )

    @contextmanager
    def locked(self, shared: bool = False) -> Iterator[None]:
        """Make the directory if needed, and keep other runs out of it for a while.

        Args:
            shared: Let other tasks in. Those on other machines are not seen, and need not be.

        Raises:
            DataError: Another run is writing it.
            OSError: It cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another tokenize command is writing {self}. Wait for its end, or name another OUT."
                ) from error
            yield
        finally:
            self._lock = None
            os.close(handle)

    @contextmanager
    def for_one_part(self, name: str) -> Iterator[Output]:
        """The output for a process that makes one part of a plan that was begun elsewhere.

        Raises:
            DataError: It is not there, as on a machine that does not share the directory.
        """
        if not self.scratch.is_dir():
            raise DataError(
                f"{self} is not there on {socket.gethostname()}. Name a directory that all machines share, "
                "or an address such as s3://bucket/tokens."
            )
        yield self

    def leave_lock(self) -> None:
        """In a forked process: let the lock end with the parent, which alone may give it up."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def standing(self, plan: Plan, overwrite: bool) -> Standing:
        """See how far the directory is, and clear it if it is to be begun anew.

        Raises:
            DataError: It holds something else, or tokens made with other settings or of other input.
        """
        self.refuse_others()
        standing = self._look()
        if standing is Standing.NEW:
            return standing
        if overwrite and (standing is Standing.FINISHED or self._differences(plan)):
            self._clear()
            return Standing.NEW
        if differences := self._differences(plan):
            raise DataError(
                f"OUT {self} was begun otherwise: {'; '.join(differences)}. Repeat the command as it "
                "was, name another OUT, or begin anew with --overwrite."
            )
        return standing

    def begin(self, plan: Plan, shared: bool = False) -> None:
        """Write down what is to be done, and remove what a killed run left half-written.

        Args:
            plan: What is to be done.
            shared: Leave what is half-written, which may be another task's, and agree with all of them.

        Raises:
            DataError: Another task has begun otherwise.
            OSError: The directory cannot be written.
        """
        self.scratch.mkdir(exist_ok=True)
        if shared:
            try:
                claimed = claim_durably(self.scratch / PLAN, plan.to_json())
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                raise DataError(
                    f"the file system of {self} has no hard links, by which tasks agree on the plan "
                    f"({error.strerror}). Name a directory on another one, or an address such as "
                    "s3://bucket/tokens."
                ) from error
            if not claimed:
                self._refuse_other_plan(plan)
            return
        for path in self.scratch.iterdir():
            if path.name.startswith("part-") and path.suffix != ".json":
                path.unlink(missing_ok=True)
        write_durably(self.scratch / PLAN, plan.to_json())

    def record(self, finished: FinishedPart) -> None:
        """Write down that a part is finished; after that it is not made again.

        Raises:
            OSError: The directory cannot be written.
        """
        write_durably(self.scratch / f"{finished.part.name}.json", json.dumps(asdict(finished)))

    def recorded(self) -> set[str]:
        """Names of the parts that were written down as finished."""
        return {path.stem for path in self.scratch.glob("part-*.json")}

    def finished_parts(self, names: Sequence[str], dtype: TokenType) -> dict[str, FinishedPart]:
        """What is known of those parts that are finished, by their names."""
        found = ((name, self._finished_part(name, dtype)) for name in names)
        return {name: finished for name, finished in found if finished is not None}

    def _finished_part(self, name: str, dtype: TokenType) -> FinishedPart | None:
        try:
            content: dict[str, Any] = json.loads((self.scratch / f"{name}.json").read_text(encoding="utf-8"))
            finished = FinishedPart(**{**content, "part": Part(**content["part"])})
            sizes = {file: (self.path / file).stat().st_size for file in finished.part.sizes(dtype)}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return finished if sizes == finished.part.sizes(dtype) else None

    def finish(self, manifest: TokenManifest) -> None:
        """Make the directory one that can be read.

        Raises:
            OSError: It cannot be written.
        """
        write_durably(self.path / MANIFEST, manifest.to_json(), scratch=self.scratch)
        self.remove_scratch()

    def remove_scratch(self) -> None:
        """Remove the records of a run that is finished."""
        shutil.rmtree(self.scratch, ignore_errors=True)  # what stays does no harm
        sync_directory(self.path)

    def manifest(self) -> TokenManifest:
        """What a finished directory holds.

        Raises:
            DataError: There is none, or it is damaged.
        """
        return read_manifest(self.path)

    def _look(self) -> Standing:
        if not is_token_directory(self.path):
            return Standing.NEW
        return Standing.FINISHED if (self.path / MANIFEST).exists() else Standing.UNFINISHED

    def _plan(self) -> Plan | None:
        """What was to be done when the directory was begun; None if that is not known."""
        return read_plan(self.scratch / PLAN)

    def part_size(self) -> int | None:
        """The size of parts with which it was begun; None if it was not, or that is not known."""
        try:
            before = self._begun()
        except (KeyError, DataError):
            return None
        size = before.settings.get("part_size") if before else None
        return size if isinstance(size, int) and size > 0 else None

    def _begun(self) -> Plan | None:
        """How the directory was begun; None if it was not, or that is not known.

        Raises:
            KeyError: The manifest lacks an entry.
            DataError: The file that tells it is damaged.
        """
        if self._look() is not Standing.FINISHED:
            plan = self._plan()
            # Another task may have finished it, and removed the plan, between the two looks.
            if plan is not None or self._look() is not Standing.FINISHED:
                return plan
        about = self.manifest().about
        return Plan.from_values(about["settings"], about["sources"])

    def _refuse_other_plan(self, plan: Plan) -> None:
        """Refuse to go along with a run that has begun otherwise in the meantime."""
        if differences := self._differences(plan):
            raise DataError(
                f"another tokenize command is writing {self}, otherwise: {'; '.join(differences)}. "
                "Wait for its end, or name another OUT."
            )

    def _differences(self, plan: Plan) -> list[str]:
        """How the directory was begun otherwise than planned now."""
        try:
            before = self._begun()
        except KeyError as error:
            return [f"{MANIFEST} has no entry {error}"]
        except DataError as error:
            return [str(error)]
        return before.differences(plan) if before else ["it holds parts, but not how they were made"]

    def _clear(self) -> None:
        # The manifest first: what remains after a kill must not look finished.
        (self.path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        for path in self.path.iterdir():
            if PART.fullmatch(path.name):
                path.unlink()
        sync_directory(self.path)
