"""Find the data files that a user means by a directory, a glob or a file name."""

from __future__ import annotations

import glob
import itertools
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import TypeAlias

from dataloader_dispatch.errors import DataError

Parts: TypeAlias = tuple[str, ...]
"""A relative path, or a glob, at its slashes."""

logger = logging.getLogger("dataloader_dispatch")

SUFFIXES = (".arrow", ".jsonl", ".md", ".parquet", ".py", ".txt")
_PACKED = tuple(f"{one}{packed}" for one in SUFFIXES for packed in (".gz", ".bz2", ".xz", ".zst", ".zip"))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was found.

    Attributes:
        path: Where it lies.
        name: Its path below the directory that was given, with forward slashes.
        size: Bytes, as far as they are known.
        problem: Why it cannot be read; empty if nothing speaks against it.
    """

    path: str
    name: str
    size: int
    problem: str = ""


def find_data_files(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], exclude: str | Sequence[str] = ()
) -> list[DataFile]:
    """List the data files below each path, sorted by name within a path; paths keep their order.

    Args:
        data: A directory (read recursively), a glob (``**`` allowed), a file, or several of these.
        exclude: Glob patterns of files and directories to leave out; see `open_documents`.

    Raises:
        DataError: A path does not exist, holds no data file, or a directory that cannot be read; it is no
            path at all; or a file is named twice.
    """
    paths = checked_paths(data)
    if not paths:
        raise DataError("no data: the list of paths is empty; name a directory, a glob or a file")
    patterns = [_split_pattern(one) for one in ([exclude] if isinstance(exclude, str) else exclude)]
    found: dict[str, str] = {}
    files: list[DataFile] = []
    for text in paths:
        for file in _files_of(text, patterns):
            # One path never lists a file twice, and resolving thousands of names takes its time.
            key = os.path.realpath(file.path) if len(paths) > 1 else file.path
            if key in found:
                raise DataError(
                    f"data file {file.path} is named twice, by {found[key]!r} and by {text!r}; name it "
                    "once, as every document is read once an epoch"
                )
            found[key] = text
            files.append(file)
    return files


def checked_paths(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
    """The paths of a setting.

    Raises:
        DataError: It holds something that is no path, or one that no file can have.
    """
    if isinstance(data, str | os.PathLike):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise DataError(
            f"data={data!r:.60} is not a path; name a directory, a glob or a file, or a list of these"
        )
    paths = []
    for path in data:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
        if not isinstance(text, str):
            raise DataError(
                f"data path {path!r:.60} is not a string or a path; name a directory, a glob or a file"
            )
        if "\0" in text:
            raise DataError(f"data path {text!r:.60} holds a NUL character, which no name of a file has")
        paths.append(text)
    return paths


def _files_of(path: str, exclude: list[Parts]) -> list[DataFile]:
    if not path.strip():
        raise DataError("data path '' is empty; name a directory, a glob or a file")
    try:
        place = Path(path).expanduser()
        is_directory, exists = place.is_dir(), place.exists() or place.is_symlink()
    except (OSError, RuntimeError) as error:  # a name that is too long, a user without a home
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"data path {path:.200} cannot be looked up: {reason}") from error
    passed: list[str] = []
    if is_directory:
        found = list(_walk(str(place), (), ("**",), exclude, passed))
        where = f"directory {path}"
    elif exists:
        return [_explicit_file(str(place))]
    elif glob.has_magic(path):
        fixed = PurePath(*itertools.takewhile(lambda part: not glob.has_magic(part), place.parts))
        found = list(_walk(str(fixed), (), place.parts[len(fixed.parts) :], exclude, passed))
        where = f"glob {path}"
    else:
        raise DataError(f"data path {path} does not exist; name a directory, a glob or a file")
    if passed:
        logger.warning(
            "%s holds %d link(s) to directories or compressed file(s), which are passed over (first: %s). "
            "If they hold data, name them or unpack them; else exclude them",
            where,
            len(passed),
            min(passed),
        )
    _say_repeated(found)
    if not found:
        left_out = f" and is not excluded by {['/'.join(pattern) for pattern in exclude]}" if exclude else ""
        raise DataError(f"{where} holds no file that ends in {', '.join(SUFFIXES)}{left_out}")
    return sorted(found, key=lambda file: file.name)


def _explicit_file(path: str) -> DataFile:
    if not _is_data(path):
        raise DataError(f"data file {path} is of no known kind; the name must end in {', '.join(SUFFIXES)}")
    return _data_file(path, PurePath(path).name)


def _say_repeated(files: list[DataFile]) -> None:
    """Warn of a file that a link names once more."""
    if not any(os.path.islink(file.path) for file in files):  # noqa: PTH114  (thousands of files)
        return
    names: dict[str, str] = {}
    for file in files:
        first = names.setdefault(os.path.realpath(file.path), file.path)
        if first != file.path:
            logger.warning(
                "%s and %s are one file, by a link: its documents come twice an epoch; exclude one of them",
                first,
                file.path,
            )
            return


def _walk(
    directory: str, above: Parts, pattern: Parts, exclude: list[Parts], passed: list[str]
) -> Iterator[DataFile]:
    """Data files below a directory whose path from the first directory on matches a pattern.

    Links to directories are not followed: they may form a circle. They are added to ``passed``, as is what
    looks like a compressed data file.
    """
    try:
        with os.scandir(directory) as entries:
            listed = list(entries)
    except OSError as error:
        raise DataError(f"cannot read the directory {directory}: {error.strerror}") from error
    for entry in listed:
        parts = (*above, entry.name)
        if entry.name.startswith(".") or any(_matches(parts, one) for one in exclude):
            continue
        if entry.is_dir(follow_symlinks=False):
            if _leads_to(parts, pattern):
                yield from _walk(entry.path, parts, pattern, exclude, passed)
        elif _leads_to_directory(entry):
            if _leads_to(parts, pattern):
                passed.append(entry.path)
        elif _is_data(entry.name) and _matches(parts, pattern):
            yield _data_file(entry.path, "/".join(parts))
        elif entry.name.lower().endswith(_PACKED) and pattern == ("**",):
            passed.append(entry.path)


def _leads_to_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a circle of links, which reading it as a file reports


def _data_file(path: str, name: str) -> DataFile:
    try:
        status = os.stat(path)  # noqa: PTH116  (thousands of files: Path objects would double the time)
    except OSError as error:
        return DataFile(path, name, 0, f"cannot read the data file {path}: {error.strerror}")
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = f"data file {path} is not a regular file; leave it out or exclude it"
    elif not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        problem = f"cannot read the data file {path}: no permission to read it"
    return DataFile(path, name, status.st_size, problem)


def _is_data(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _split_pattern(pattern: str) -> Parts:
    if not pattern.strip("/"):
        raise DataError(f"exclude pattern {pattern!r} is empty; write a glob such as '**/test/**' or '*.md'")
    parts = tuple(part for part in pattern.split("/") if part)
    return parts if len(parts) > 1 else ("**", parts[0])


def _leads_to(parts: Parts, pattern: Parts) -> bool:
    """Whether something below a directory may match a pattern."""
    if not parts or pattern[:1] == ("**",):
        return True
    return len(pattern) > 1 and fnmatchcase(parts[0], pattern[0]) and _leads_to(parts[1:], pattern[1:])


def _matches(parts: Parts, pattern: Parts) -> bool:
    """Whether the parts of a relative path match those of a pattern; ``**`` is any number of parts."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[skip:], pattern[1:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
