"""The description of a directory of token ids: ``manifest.json``."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from dataloader_dispatch.errors import DataError

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
"""Directory of what a run that writes tokens has not finished yet."""
FORMAT = "dataloader-dispatch tokens"
SCHEMA_VERSION = 1
PART = re.compile(r"part-\d{5,}\.(bin|idx)")

TokenType: TypeAlias = Literal["uint16", "uint32", "int64"]
"""Type of the token ids in the files, little-endian."""

ITEM_BYTES: Mapping[str, int] = {"uint16": 2, "uint32": 4, "int64": 8}
_FINISH = "run the same `dataloader-dispatch tokenize` command again to finish it"


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
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(_what_is_missing(directory)) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; tokenize again with --overwrite") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(
            f"{path} is not the manifest of a directory that `dataloader-dispatch tokenize` wrote"
        )
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema_version={version!r}; this version of dataloader-dispatch reads "
            f"{SCHEMA_VERSION}: install a version that reads it, or tokenize again with --overwrite"
        )
    try:
        return _checked(content)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is damaged: {reason}; tokenize again with --overwrite") from error


def _claims_tokens(path: Path) -> bool:
    with path.open("rb") as stream:
        return FORMAT.encode() in stream.read(200)


def _what_is_missing(directory: Path) -> str:
    if not directory.is_dir():
        return f"there is no directory {directory}; name one that `dataloader-dispatch tokenize` wrote"
    if is_token_directory(directory):
        return f"{directory} is not finished: it holds parts and no {MANIFEST}; {_FINISH}"
    return f"{directory} holds no {MANIFEST}; name a directory that `dataloader-dispatch tokenize` wrote"


def _checked(content: dict[str, Any]) -> TokenManifest:
    parts = tuple(_part(one) for one in content["parts"])
    dtype = content["dtype"]
    if dtype not in get_args(TokenType):
        raise ValueError(f"dtype={dtype!r} is none of {get_args(TokenType)}")
    eos = content["eos_token_id"]
    manifest = TokenManifest(
        dtype=cast(TokenType, dtype),
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
