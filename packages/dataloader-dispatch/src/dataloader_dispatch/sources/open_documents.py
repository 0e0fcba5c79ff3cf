"""Find the data files that a user means by a directory, a glob or a file name, and open them."""

from __future__ import annotations

import glob
import itertools
import logging
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Literal, TypeAlias, get_args

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.columns import ArrowReader, ParquetReader, RecentColumns
from dataloader_dispatch.sources.files import (
    DataFile,
    FileDocuments,
    JsonLinesReader,
    Reader,
    ReadSettings,
    RecentFiles,
    RecentlyUsed,
    TextReader,
    UndecodablePolicy,
)
from dataloader_dispatch.sources.stored import (
    StoredArrowReader,
    StoredLinesReader,
    StoredParquetReader,
    StoredTextReader,
)
from dataloader_dispatch.sources.token_binary import TokenBinary, is_token_directory, is_token_objects
from dataloader_dispatch.store.addresses import Address, objects_of, parse_place
from dataloader_dispatch.store.block_cache import SMALL_BLOCK_BYTES
from dataloader_dispatch.store.reader import CacheSettings, StoredFile, announce, cache_settings
from dist_env import size_text

logger = logging.getLogger("dataloader_dispatch")
DEFAULT_COLUMN = "text"
_COLUMNS = (".jsonl", ".parquet", ".arrow")

Parts: TypeAlias = tuple[str, ...]
"""A relative path, or a glob, at its slashes."""

UnreadablePolicy: TypeAlias = Literal["stop", "skip"]
"""What to do with a file or document that cannot be read; see `open_documents`."""

SUFFIXES = (".arrow", ".jsonl", ".md", ".parquet", ".py", ".txt")
_PACKED = tuple(f"{one}{packed}" for one in SUFFIXES for packed in (".gz", ".bz2", ".xz", ".zst", ".zip"))
MAX_DOCUMENT_BYTES = 1 << 30
_RECENT_BYTES = 512 << 20
_RECENT_BLOCKS = 128
_RECENT_FILES = 64
_OPENED_AHEAD = 16
_FOOTER_BYTES = 1 << 16


def find_data_files(
    paths: Sequence[str], exclude: str | Sequence[str] = (), stored: Mapping[str, StoredPlace] | None = None
) -> list[DataFile]:
    """List the data files below each path, sorted by name within a path; paths keep their order.

    Args:
        paths: Directories (read recursively), globs (``**`` allowed) and files.
        exclude: Glob patterns of files and directories to leave out; see `open_documents`.
        stored: What lies at those of the paths that are addresses.

    Raises:
        DataError: A path does not exist, holds no data file, or a directory that cannot be read; it is no
            path at all; or a file is named twice.
    """
    if not paths:
        raise DataError("no data: the list of paths is empty. Name a directory, a glob or a file.")
    patterns = [_split_pattern(one) for one in ([exclude] if isinstance(exclude, str) else exclude)]
    found: dict[str, str] = {}
    files: list[DataFile] = []
    for text in paths:
        place = stored.get(text) if stored else None
        for file in _files_of(text, patterns) if place is None else place.files(patterns):
            # One path never lists a file twice, and resolving thousands of names takes its time.
            key = os.path.realpath(file.path) if len(paths) > 1 and place is None else file.path
            if key in found:
                raise DataError(
                    f"data file {file.path} is named twice, by {found[key]!r} and by {text!r}. Name it "
                    "once, as every document is read once an epoch."
                )
            found[key] = text
            files.append(file)
    return files


def checked_paths(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> list[str]:
    """The paths of a setting.

    Raises:
        DataError: It holds something that is not a path, or one that no file can have.
    """
    if isinstance(data, str | os.PathLike):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        raise DataError(
            f"data={data!r:.60} is not a path. Name a directory, a glob or a file, or a list of these."
        )
    paths = []
    for path in data:
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
        if not isinstance(text, str):
            raise DataError(
                f"data path {path!r:.60} is not a string or a path. Name a directory, a glob or a file."
            )
        if "\0" in text:
            raise DataError(f"data path {text!r:.60} holds a NUL character, which no name of a file has.")
        paths.append(text)
    return paths


def _files_of(path: str, exclude: list[Parts]) -> list[DataFile]:
    if not path.strip():
        raise DataError("data path '' is empty. Name a directory, a glob or a file.")
    try:
        place = Path(path).expanduser()
        is_directory, exists = place.is_dir(), place.exists() or place.is_symlink()
    except (OSError, RuntimeError) as error:  # a name that is too long, a user without a home
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DataError(f"data path {path:.200} cannot be looked up: {reason}.") from error
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
        raise DataError(f"data path {path} does not exist. Name a directory, a glob or a file.")
    if passed:
        logger.warning(
            "%s holds %d link(s) to directories or compressed file(s), which are passed over (first: %s). "
            "If they hold data, name them or unpack them; else exclude them",
            where,
            len(passed),
            min(passed),
        )
    _say_repeated(found)
    return _sorted_files(found, where, exclude)


def _sorted_files(found: list[DataFile], where: str, exclude: list[Parts]) -> list[DataFile]:
    if not found:
        left_out = f" and is not excluded by {['/'.join(pattern) for pattern in exclude]}" if exclude else ""
        raise DataError(f"{where} holds no file that ends in {', '.join(SUFFIXES)}{left_out}.")
    return sorted(found, key=lambda file: file.name)


def _explicit_file(path: str) -> DataFile:
    _check_kind(path)
    return _data_file(path, PurePath(path).name)


def _check_kind(path: str) -> None:
    if not _is_data(path):
        raise DataError(f"data file {path} is of no known kind. Its name must end in {', '.join(SUFFIXES)}.")


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """What lies at an address.

    Attributes:
        place: The address; of a glob, that of the folder in which it begins.
        pattern: What is selected below it.
        objects: The objects there.
        single: Whether the address is that of an object.
    """

    place: Address
    pattern: Parts
    objects: Sequence[StoredFile]
    single: bool

    @property
    def is_token_directory(self) -> bool:
        """Whether the objects are those of token ids, finished or not."""
        return not self.single and self.pattern == ("**",) and is_token_objects(self.place, self.objects)

    def files(self, exclude: list[Parts]) -> list[DataFile]:
        """The data files there, sorted by name.

        Raises:
            DataError: There is none.
        """
        if self.single:
            (one,) = self.objects
            _check_kind(str(one))
            return [DataFile(str(one), one.key.rpartition("/")[2], one.size, stored=one)]
        where = f"{self.place}/" if self.pattern == ("**",) else f"glob {self.place}/{'/'.join(self.pattern)}"
        if not self.objects:
            raise DataError(f"data path {self.place} does not exist. Name a folder, a glob or an object.")
        found: list[DataFile] = []
        packed: list[str] = []
        prefix = f"{self.place.key}/" if self.place.key else ""
        for one in self.objects:
            parts = tuple(one.key.removeprefix(prefix).split("/"))
            # As on a disk: with a folder goes all that it holds.
            heads = [parts[:count] for count in range(1, len(parts) + 1)]
            if any(part.startswith(".") for part in parts) or any(
                _matches(head, pattern) for head in heads for pattern in exclude
            ):
                continue
            if _is_data(parts[-1]) and _matches(parts, self.pattern):
                found.append(DataFile(str(one), "/".join(parts), one.size, stored=one))
            elif parts[-1].lower().endswith(_PACKED) and self.pattern == ("**",):
                packed.append(str(one))
        if packed:
            logger.warning(
                "%s holds %d compressed file(s), which are passed over (first: %s). If they hold data, "
                "unpack them; else exclude them",
                where,
                len(packed),
                min(packed),
            )
        return _sorted_files(found, where, exclude)


def look_up(place: Address, settings: CacheSettings) -> StoredPlace:
    """What lies at an address, which may be a glob.

    Raises:
        StoreError: The store cannot be read.
        DataError: obstore is missing, or its settings cannot be used.
    """
    objects, single = objects_of(place, settings)
    if objects or not glob.has_magic(place.key):
        return StoredPlace(place, ("**",), objects, single)
    parts = tuple(place.key.split("/"))
    fixed = tuple(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    above = place._replace(key="/".join(fixed), is_folder=True)
    objects, single = objects_of(above, settings)
    return StoredPlace(above, parts[len(fixed) :], objects, single)


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
        raise DataError(f"cannot read the directory {directory}: {error.strerror}.") from error
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
        return DataFile(path, name, 0, f"cannot read the data file {path}: {error.strerror}.")
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
        raise DataError(f"exclude pattern {pattern!r} is empty. Write a glob such as '**/test/**' or '*.md'.")
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


def open_documents(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    exclude: str | Sequence[str] = (),
    undecodable: UndecodablePolicy = "error",
    text_column: str = DEFAULT_COLUMN,
    unreadable: UnreadablePolicy = "stop",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> FileDocuments | TokenBinary:
    """Open files as documents.

    Files ending in ``.txt``, ``.md`` and ``.py`` are one document each, a line of a ``.jsonl`` file is one
    (blank lines are not), and so is a row of a ``.parquet`` or ``.arrow`` file (extra ``arrow``; Arrow IPC in
    the file or the stream format, the latter as Hugging Face ``datasets`` stores it). Text is UTF-8. A column
    of integer lists gives documents that are token ids, int64 tensors of shape [n].

    Nothing but names and sizes is read for text files; documents are read when they are asked for. A
    ``.jsonl`` file is read through once to find its lines, of a ``.parquet`` file the footer is read, of an
    ``.arrow`` file, which is mapped into memory, the heads of its batches. Of a table one column is read.
    The documents have the same order on every machine: by path, and within a directory or glob by file name.

    Addresses such as ``s3://bucket/path`` (also ``gs://`` and ``az://``, extra ``remote``) may stand for
    paths: of an object, of a folder, or with a glob. Fingerprint, order and rows are those of the same files
    on a disk. Credentials come from the environment. For each process that reads, another one fetches blocks
    of 1 MiB into a cache on the disk (128 KiB of JSON lines and token ids that are larger than the cache). An
    object that is replaced while it is in use is refused. An Arrow file is brought into the cache as a whole.
    ``file:///path`` is the path.

    A directory that ``dataloader-dispatch tokenize`` wrote is opened as `TokenBinary`; it holds token ids,
    so the settings below have no meaning for it.

    Args:
        data: A directory (read with its subdirectories; names with a leading dot, links to directories and
            files with other endings are passed over; a warning tells of links and compressed files), a glob
            (``**`` stands for any directories; it selects files), a file, or a sequence of these.
        exclude: Globs of what to leave out, matched with the path below the directory that was given. ``**``
            stands for any number of directories; a pattern without a slash matches a file or
            directory of that name anywhere. With a directory goes all it holds. Files that ``data`` names
            directly stay.
        undecodable: A document that is not UTF-8, noticed when it is read: ``"error"`` raises with the
            file and the byte; ``"skip"`` makes it an empty document, which `DocumentStream` leaves out;
            ``"replace"`` puts U+FFFD for what cannot be decoded. `FileDocuments.undecodable` counts them.
        text_column: Key (``.jsonl``) or column (``.parquet``, ``.arrow``) that holds the text or token ids. A
            warning tells where no file has any.
        unreadable: A file that cannot be opened (it is damaged, not complete, lacks the column, is gone, or
            must not be read), or a document that cannot be read later (that, or it is malformed, or larger
            than allowed): ``"stop"`` raises; ``"skip"`` leaves the file out, or makes the document an empty
            one. `FileDocuments.skipped` tells which; the first of each file is logged as a warning. A JSON
            lines file none of whose first 100 documents can be read counts as one that cannot be
            opened. What this process has run out of (memory, open files) is never skipped.
        cache_dir: For addresses: the directory in which blocks of objects are kept, on a disk of this
            machine; processes, ranks and jobs may share it. None: ``DATALOADER_DISPATCH_CACHE_DIR``, or one
            in the user's cache directory.
        cache_bytes: For addresses: bytes that the cache may take, at least 8 MiB; the blocks used longest ago
            go first. None: ``DATALOADER_DISPATCH_CACHE_BYTES``, or 16 GiB or a tenth of the disk's free
            space, whichever is less.
        max_document_bytes: Size of the largest document to read, at least 1. A larger one cannot be read. Its
            size is known before it is read; of a JSON line, that of the whole line counts. A Parquet row
            is measured after its row group is read.

    Returns:
        The documents.

    Raises:
        StoreError: An object store cannot be reached, refuses the credentials, or fails. Reading a document
            raises it, too, after the retries; it is never taken for an unreadable document.
        DataError: A path does not exist, cannot be read, is not a path, or holds no data file; a file is
            named twice; there are only empty files; a first line is malformed; a column is missing or holds
            neither text nor token ids; pyarrow is needed but not installed; a setting is out of range; a
            directory of token ids is damaged, not finished, or one of several paths.
    """
    _check_choice("undecodable", undecodable, get_args(UndecodablePolicy))
    _check_choice("unreadable", unreadable, get_args(UnreadablePolicy))
    if (
        isinstance(max_document_bytes, bool)
        or not isinstance(max_document_bytes, int)
        or max_document_bytes < 1
    ):
        raise DataError(f"max_document_bytes={max_document_bytes!r} must be an integer of at least 1.")
    texts = checked_paths(data)
    places = {text: parse_place(text) for text in texts}
    paths = [text if isinstance(places[text], Address) else str(places[text]) for text in texts]
    stored: dict[str, StoredPlace] = {}
    if any(isinstance(place, Address) for place in places.values()):
        cache = cache_settings(cache_dir, cache_bytes)
        stored = {text: look_up(place, cache) for text, place in places.items() if isinstance(place, Address)}
    for path in paths:
        if stored[path].is_token_directory if path in stored else is_token_directory(path):
            if len(paths) == 1:
                return TokenBinary(path, cache_dir=cache_dir, cache_bytes=cache_bytes)
            raise DataError(
                f"data path {path} holds token ids, and cannot be opened together with other paths. Open "
                "each by itself and mix them with mix_documents."
            )
    files = find_data_files(paths, exclude, stored)
    _warn_of_small_cache(files)
    _warn_of_unused_column(files, text_column)
    settings = ReadSettings(text_column, max_document_bytes, skip=unreadable == "skip")
    columns: RecentColumns = RecentlyUsed(_RECENT_BYTES, _RECENT_BLOCKS)
    lines: RecentFiles = RecentlyUsed(0, _RECENT_FILES)

    ahead = _announce_openings(files)

    def open_reader(file: DataFile) -> Reader:
        name = file.path.lower()
        if file.stored is not None:
            next(ahead, None)
            return _stored_reader(name, file.stored, settings, lines, columns)
        if name.endswith(".jsonl"):
            return JsonLinesReader(file.path, settings, lines)
        if name.endswith(".parquet"):
            return ParquetReader(file.path, settings, columns)
        if name.endswith(".arrow"):
            return ArrowReader(file.path, settings, columns)
        return TextReader(file.path, file.size, settings)

    return FileDocuments(files, undecodable, settings, open_reader)


def _stored_reader(
    name: str, file: StoredFile, settings: ReadSettings, lines: RecentFiles, columns: RecentColumns
) -> Reader:
    if name.endswith(".jsonl"):
        return StoredLinesReader(file, settings, lines)
    if name.endswith(".parquet"):
        return StoredParquetReader(file, settings, columns)
    if name.endswith(".arrow"):
        return StoredArrowReader(file, settings, columns)
    return StoredTextReader(file, settings)


def _announce_openings(files: Sequence[DataFile]) -> Iterator[None]:
    """Have what opening the objects reads first fetched ahead; one step for each object."""
    needed = [file.stored for file in files if file.stored is not None]
    for number in range(len(needed)):
        if number % _OPENED_AHEAD == 0:
            spans = []
            for one in needed[number : number + 2 * _OPENED_AHEAD]:
                name = one.key.lower()
                if name.endswith(".jsonl"):
                    spans.append((one, 0, one.size))
                elif name.endswith(".parquet"):
                    spans.append((one, max(0, one.size - _FOOTER_BYTES), one.size))
            announce(spans)
        yield


def _warn_of_small_cache(files: Sequence[DataFile]) -> None:
    stored = [file.stored for file in files if file.stored is not None]
    size = sum(one.size for one in stored)
    if stored and stored[0].settings.directory and size > stored[0].settings.limit:
        logger.warning(
            "the data in object stores have %s and the cache holds %s: in a shuffled order a block of %s is "
            "fetched for nearly each document. Raise cache_bytes if the disk allows",
            size_text(size),
            size_text(stored[0].settings.limit),
            size_text(SMALL_BLOCK_BYTES),
        )


def _warn_of_unused_column(files: Sequence[DataFile], text_column: str) -> None:
    """Say that a column was named that no file has: JSON lines in a ``.txt`` file are read as they are."""
    if text_column != DEFAULT_COLUMN and not any(file.path.lower().endswith(_COLUMNS) for file in files):
        logger.warning(
            "text_column=%r has no effect: none of the %d file(s), such as %s, ends in %s, and each is read "
            "as one document, as it is. Rename those that hold JSON lines or a table, or leave it out",
            text_column,
            len(files),
            files[0].path,
            ", ".join(_COLUMNS),
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise DataError(f"{name}={value!r} is unknown. Choose one of {choices}.")
