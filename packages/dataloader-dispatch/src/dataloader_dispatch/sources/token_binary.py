"""Token ids in binary files: their manifest, and reading them memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from dataloader_dispatch.documents import Integers, locate
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.files import RecentlyUsed, UnreadableError, os_failure
from dataloader_dispatch.sources.stored import StoredIntegers, stored_errors
from dataloader_dispatch.store.addresses import Address, parse_place
from dataloader_dispatch.store.reader import StoredFile, announce, cache_settings, list_objects

if TYPE_CHECKING:
    import torch

TokenType: TypeAlias = Literal["uint16", "uint32", "int64"]
"""Type of the token ids in the files, little-endian."""

ITEM_BYTES: Mapping[str, int] = {"uint16": 2, "uint32": 4, "int64": 8}

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
"""Directory of what a run that writes tokens has not finished yet."""
FORMAT = "dataloader-dispatch tokens"
SCHEMA_VERSION = 1
PART = re.compile(r"part-\d{5,}\.(bin|idx)")
_FINISH = "Run the same `dataloader-dispatch tokenize` command again to finish it."
_MAPPED_PARTS = 128
_KEPT_INDEX_BYTES = 64 << 20
_KEPT_INDEX_DOCUMENTS = 1 << 16
"""Of a part in a store: the index of one with more is read in ranges, too."""
_CHUNK = 1 << 22
_INDEX: np.dtype[np.integer] = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Part:
    """A pair of files, ``<name>.bin`` with the token ids of its documents and ``<name>.idx`` with offsets.

    Attributes:
        name: Name without the ending.
        documents: Documents in it; the index holds one offset more.
        tokens: Token ids in it.
        bin_crc32: CRC-32 of the token file.
        idx_crc32: CRC-32 of the index file.
    """

    name: str
    documents: int
    tokens: int
    bin_crc32: int
    idx_crc32: int

    def sizes(self, dtype: TokenType) -> dict[str, int]:
        """Bytes of each of the two files, by name."""
        return {
            f"{self.name}.bin": self.tokens * ITEM_BYTES[dtype],
            f"{self.name}.idx": (self.documents + 1) * 8,
        }


@dataclass(frozen=True, slots=True)
class TokenManifest:
    """What is in a directory of token ids.

    Attributes:
        dtype: Type of the token ids.
        tokenizer: Name of the tokenizer.
        vocabulary_size: One more than the largest token id that the tokenizer may give.
        eos_token_id: Separator to put between documents; None if the tokenizer has none. It is in no file.
        documents: Documents in all parts.
        tokens: Token ids in all parts.
        parts: The parts, in order.
        about: What the tokens were made of, and how; for people and for the tokenize command.
    """

    dtype: TokenType
    tokenizer: str
    vocabulary_size: int
    eos_token_id: int | None
    documents: int
    tokens: int
    parts: tuple[Part, ...]
    about: Mapping[str, Any]

    def to_json(self) -> str:
        """The text of ``manifest.json``; the same for equal manifests."""
        head = {"format": FORMAT, "schema_version": SCHEMA_VERSION}
        return json.dumps({**head, **asdict(self)}, indent=1) + "\n"

    def fingerprint(self) -> str:
        """Digest of the documents: their number, their lengths and their token ids."""
        parts = [(part.documents, part.tokens, part.bin_crc32, part.idx_crc32) for part in self.parts]
        return hashlib.sha256(f"tokens {self.dtype} {parts}".encode()).hexdigest()


def is_token_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory of token ids, finished or not."""
    if not os.fspath(path):
        return False  # not the directory we are in
    try:
        place = Path(path).expanduser()
        if (place / UNFINISHED / "plan.json").is_file():
            return True
        if (place / MANIFEST).is_file() and _claims_tokens(place / MANIFEST):
            return True
        with os.scandir(place) as entries:
            return any(entry.name.endswith(".idx") and PART.fullmatch(entry.name) for entry in entries)
    except (OSError, RuntimeError):
        return False  # not a directory, or one that cannot be read or found, which others say better


def read_manifest(directory: Path) -> TokenManifest:
    """Read ``manifest.json``.

    Raises:
        DataError: There is none, it is damaged, or of a newer version.
    """
    path = directory / MANIFEST
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise DataError(_what_is_missing(directory)) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}.") from error


def parse_manifest(raw: bytes, path: str) -> TokenManifest:
    """The manifest in the bytes of ``manifest.json``.

    Args:
        raw: The bytes.
        path: Where they are from, for messages.

    Raises:
        DataError: It is damaged, or of a newer version.
    """
    try:
        content = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}. Tokenize again with --overwrite.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(
            f"{path} is not the manifest of a directory that `dataloader-dispatch tokenize` wrote."
        )
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema_version={version!r}, but this version of dataloader-dispatch reads "
            f"{SCHEMA_VERSION}. Install a version that reads it, or tokenize again with --overwrite."
        )
    try:
        return _checked(content)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is damaged: {reason}. Tokenize again with --overwrite.") from error


def _claims_tokens(path: Path) -> bool:
    with path.open("rb") as stream:
        return FORMAT.encode() in stream.read(200)


def _what_is_missing(directory: Path) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}. Name one that `dataloader-dispatch tokenize` wrote."
    if is_token_directory(directory):
        return f"{directory} is not finished: it holds parts and no {MANIFEST}. {_FINISH}"
    return f"{directory} holds no {MANIFEST}. Name a directory that `dataloader-dispatch tokenize` wrote."


def _checked(content: dict[str, Any]) -> TokenManifest:
    parts = tuple(_part(one) for one in content["parts"])
    dtype: TokenType = content["dtype"]
    if dtype not in get_args(TokenType):
        raise ValueError(f"dtype={dtype!r} is none of {get_args(TokenType)}")
    eos = content["eos_token_id"]
    manifest = TokenManifest(
        dtype=dtype,
        tokenizer=str(content["tokenizer"]),
        vocabulary_size=_count(content["vocabulary_size"], "vocabulary_size"),
        eos_token_id=None if eos is None else _count(eos, "eos_token_id"),
        documents=_count(content["documents"], "documents"),
        tokens=_count(content["tokens"], "tokens"),
        parts=parts,
        about=dict(content["about"]),
    )
    if len({part.name for part in parts}) < len(parts):
        raise ValueError("it names a part twice")
    for name in ("documents", "tokens"):
        total = sum(getattr(part, name) for part in parts)
        if total != getattr(manifest, name):
            raise ValueError(f"{name}={getattr(manifest, name)}, but the parts hold {total}")
    return manifest


def _part(record: Mapping[str, Any]) -> Part:
    name = record["name"]
    if not isinstance(name, str) or not PART.fullmatch(f"{name}.bin"):
        raise ValueError(f"{name!r} is not the name of a part")
    counts = {key: _count(record[key], key) for key in ("documents", "tokens", "bin_crc32", "idx_crc32")}
    return Part(name, **counts)


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is not a count")
    return value


class _Mapped(NamedTuple):
    """A part. ``tokens`` has shape [number of tokens], ``offsets`` int64 [number of documents + 1]."""

    tokens: Integers | StoredIntegers
    offsets: Integers | StoredIntegers


class _DiskFiles:
    """The files of a directory on the disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def manifest(self) -> TokenManifest:
        return read_manifest(self.directory)

    def where(self, name: str) -> Path:
        return self.directory / name

    def size(self, name: str) -> int:
        path = self.directory / name
        try:
            return path.stat().st_size
        except OSError as error:
            raise os_failure(str(path), error) from error

    def integers(self, name: str, kind: np.dtype[np.integer], count: int) -> Integers:
        return _memory_map(self.directory / name, kind, count)

    def chunks(self, name: str) -> Iterator[bytes]:
        path = self.directory / name
        try:
            with path.open("rb") as stream:
                while block := stream.read(_CHUNK):
                    yield block
        except OSError as error:
            raise os_failure(str(path), error) from error


class _StoredFiles:
    """The objects below an address."""

    def __init__(self, place: Address, objects: Sequence[StoredFile]) -> None:
        self.directory = str(place)
        prefix = f"{place.key}/" if place.key else ""
        self._objects = {one.key.removeprefix(prefix): one for one in objects}

    def manifest(self) -> TokenManifest:
        if MANIFEST not in self._objects:
            raise DataError(self._what_is_missing())
        return parse_manifest(b"".join(self.chunks(MANIFEST)), self.where(MANIFEST))

    def _what_is_missing(self) -> str:
        if any(PART.fullmatch(name) or name.startswith(f"{UNFINISHED}/") for name in self._objects):
            return f"{self.directory} is not finished: it holds parts and no {MANIFEST}. {_FINISH}"
        return (
            f"{self.directory} holds no {MANIFEST}. Name a place that `dataloader-dispatch tokenize` wrote."
        )

    def where(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def size(self, name: str) -> int:
        return self._object(name).size

    def integers(self, name: str, kind: np.dtype[np.integer], count: int) -> StoredIntegers:
        return StoredIntegers(self._object(name), kind)

    def chunks(self, name: str) -> Iterator[bytes]:
        file = self._object(name)
        for start in range(0, file.size, _CHUNK):
            with stored_errors():
                yield file.read(start, start + _CHUNK)

    def _object(self, name: str) -> StoredFile:
        try:
            return self._objects[name]
        except KeyError:
            raise UnreadableError(f"the data file {self.where(name)} does not exist.") from None


def is_token_objects(place: Address, objects: Sequence[StoredFile]) -> bool:
    """Whether the objects below an address are those of token ids, finished or not."""
    files = _StoredFiles(place, objects)
    names = [one.key.removeprefix(f"{place.key}/" if place.key else "") for one in objects]
    if any(name.endswith(".idx") and PART.fullmatch(name) for name in names):
        return True
    if f"{UNFINISHED}/plan.json" in names:
        return True
    return MANIFEST in names and FORMAT.encode() in next(files.chunks(MANIFEST), b"")[:200]


class TokenBinary:
    """Documents that ``dataloader-dispatch tokenize`` wrote.

    The directory holds ``manifest.json`` and parts. ``part-00000.bin`` has the token ids of its documents end
    to end, without separators, little-endian in the type that the manifest names; ``part-00000.idx`` has,
    as int64, where each document starts, in tokens, and where the last one ends.

    The files are mapped when a document of theirs is asked for, at most 128 parts at a time, so that a
    directory larger than memory can be read in any order. Copies for other processes hold no map. Several
    processes may read at once, and share the memory.

    Args:
        directory: The directory, or the address of one in an object store (extra ``remote``).
        cache_dir: As for `open_documents`.
        cache_bytes: As for `open_documents`.

    Raises:
        StoreError: The store cannot be read.
        DataError: It does not exist, is not finished, or is damaged: the manifest, or the size or index of a
            part, which the message names. The content of the token files is not read; see `verify`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        place = parse_place(os.fspath(directory))
        self._files: _DiskFiles | _StoredFiles
        if isinstance(place, Address):
            settings = cache_settings(cache_dir, cache_bytes)
            self._files = _StoredFiles(place, list_objects(place.root, place.key, settings))
        else:
            self._files = _DiskFiles(Path(place).expanduser())
        self.directory = self._files.directory
        self.manifest = self._files.manifest()
        parts = self.manifest.parts
        self._starts = array("Q", accumulate((part.documents for part in parts), initial=0))
        self._mapped: RecentlyUsed[_Mapped] = RecentlyUsed(_KEPT_INDEX_BYTES, _MAPPED_PARTS)
        if isinstance(self._files, _StoredFiles):
            announce(
                self._files.integers(f"{part.name}.idx", _INDEX, 0).span(0, part.documents + 1)
                for part in parts
            )
        for part in parts:
            self._check_sizes(part)
            self._check_index(part)
        if not len(self):
            raise DataError(f"{self.directory} holds no document. Tokenize data that hold some.")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> torch.Tensor:
        """Token ids of a document, without separator.

        Returns:
            int64 tensor of shape [number of tokens], with memory of its own.

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
            DataError: The file of the document is gone or shorter than it was.
        """
        number, place = locate(self._starts, index)
        mapped = self._part(number)
        start, stop = mapped.offsets[place : place + 2]
        import torch

        return torch.from_numpy(mapped.tokens[start:stop].astype(np.int64))

    @property
    def num_tokens(self) -> int:
        """Token ids of all documents, separators not included."""
        return self.manifest.tokens

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's separator, which the files do not hold; None if it has none."""
        return self.manifest.eos_token_id

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest token id that the tokenizer may give, the separator included."""
        return self.manifest.vocabulary_size

    def where(self, index: int) -> str:
        """The place of a document in words."""
        number, place = locate(self._starts, index)
        return f"{self._files.where(self.manifest.parts[number].name)}.bin document {place}"

    @property
    def will_read(self) -> Callable[[Sequence[int]], None] | None:
        """Tells which documents are read soon, in order; None on a disk. See `FileDocuments.will_read`."""
        return self._read_ahead if isinstance(self._files, _StoredFiles) else None

    def _read_ahead(self, indices: Sequence[int]) -> None:
        spans = []
        for index in indices:
            number, place = locate(self._starts, index)
            tokens, offsets = self._part(number)
            start, stop = offsets[place : place + 2]
            if isinstance(tokens, StoredIntegers):
                spans.append(tokens.span(int(start), int(stop)))
        announce(spans)

    def fingerprint(self) -> str:
        """Digest of numbers, lengths and checksums in the manifest; a copy elsewhere has the same."""
        return self.manifest.fingerprint()

    def verify(self) -> None:
        """Read all files and compare them with the checksums in the manifest.

        Raises:
            DataError: A file differs; the message names it.
        """
        for part in self.manifest.parts:
            for ending, expected in ((".bin", part.bin_crc32), (".idx", part.idx_crc32)):
                name = f"{part.name}{ending}"
                if (found := self._checksum(name)) != expected:
                    raise _damaged(
                        self._files.where(name),
                        f"has the CRC-32 {found:#x}, and {MANIFEST} says {expected:#x}",
                    )

    def _part(self, number: int) -> _Mapped:
        return self._mapped.get(number, lambda: self._map(self.manifest.parts[number]))

    def _checksum(self, name: str) -> int:
        value = 0
        for block in self._files.chunks(name):
            value = zlib.crc32(block, value)
        return value

    def _map(self, part: Part) -> tuple[_Mapped, int]:
        """A part, with the bytes of memory it takes."""
        self._check_sizes(part)
        kind = np.dtype(self.manifest.dtype).newbyteorder("<")
        tokens = self._files.integers(f"{part.name}.bin", kind, part.tokens)
        offsets = self._files.integers(f"{part.name}.idx", _INDEX, part.documents + 1)
        if isinstance(offsets, StoredIntegers) and part.documents <= _KEPT_INDEX_DOCUMENTS:
            kept = offsets[0 : part.documents + 1]
            return _Mapped(tokens, kept), kept.nbytes
        return _Mapped(tokens, offsets), 0

    def _check_sizes(self, part: Part) -> None:
        for name, expected in part.sizes(self.manifest.dtype).items():
            if (size := self._files.size(name)) != expected:
                raise _damaged(self._files.where(name), f"has {size} bytes, and {MANIFEST} says {expected}")

    def _check_index(self, part: Part) -> None:
        name = f"{part.name}.idx"
        offsets = np.frombuffer(b"".join(self._files.chunks(name)), dtype=_INDEX)
        if offsets[0] != 0 or offsets[-1] != part.tokens or (np.diff(offsets) < 0).any():
            raise _damaged(
                self._files.where(name),
                f"does not rise from 0 to the {part.tokens} tokens of the part, as an index of offsets does",
            )


def _memory_map(path: Path, kind: np.dtype[np.integer], count: int) -> Integers:
    if count == 0:
        return np.empty(0, dtype=kind)  # an empty file cannot be mapped
    try:
        return np.memmap(path, dtype=kind, mode="r", shape=(count,))
    except OSError as error:
        raise os_failure(str(path), error) from error


def _damaged(path: Path | str, what: str) -> DataError:
    return DataError(
        f"{path} is damaged or not complete: it {what}. Copy the directory again, or tokenize again with "
        "--overwrite."
    )
