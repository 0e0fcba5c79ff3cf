"""Text to token ids: raw bytes, or a Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataloader_dispatch.errors import DataError
from dataloader_dispatch.sources.token_binary import Integers
from dataloader_dispatch.sources.token_manifest import TokenType
from dataloader_dispatch.stream.pieces import TextUnit, text_unit_of

BYTES = "bytes"
_PROBE = "The quick brown fox, 1"


class Encoder(Protocol):
    """Makes token ids of texts, without anything put around them."""

    name: str
    vocabulary_size: int
    eos_token_id: int | None
    fingerprint: str
    added: tuple[str, ...]
    """Tokens that the tokenizer would put around a text by itself."""
    text_unit: TextUnit
    """The most text that it looks at as a whole."""

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        """Token ids of each text."""
        ...


class ByteEncoder:
    """The bytes of the text in UTF-8, ids 0 to 255; the separator is 256."""

    name = BYTES
    vocabulary_size = 257
    eos_token_id: int | None = 256
    fingerprint = "utf-8"
    added: tuple[str, ...] = ()
    text_unit: TextUnit = "character"

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class HuggingFaceEncoder:
    """A tokenizer of transformers.

    Args:
        name: Its directory, or its name on the Hub.
        offline: Never go online for it.

    Raises:
        DataError: transformers is not installed, the tokenizer cannot be loaded, or it puts tokens around
            every text that cannot be turned off.
    """

    def __init__(self, name: str, offline: bool) -> None:
        self.name = name
        self._tokenizer = _load(name, offline)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        ids = [*self._tokenizer.get_vocab().values(), len(self._tokenizer) - 1]
        self.vocabulary_size = max(ids) + 1
        self.fingerprint = self._digest()
        self.text_unit: TextUnit = text_unit_of(self._tokenizer.encode, None)
        usual: list[int] = self._tokenizer(_PROBE)["input_ids"]
        bare = self.encode([_PROBE])[0].tolist()
        self.added = tuple(
            self._tokenizer.convert_ids_to_tokens(sorted(set(usual) - set(bare))) if usual != bare else ()
        )
        if around := self.encode([""])[0].tolist():
            raise DataError(
                f"the tokenizer {name!r} puts the token ids {around} around every text even with "
                "add_special_tokens=False; documents are stored without separators: turn this off in "
                "the tokenizer's files"
            )

    def encode(self, texts: Sequence[str]) -> list[Integers]:
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def _digest(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            # Set by whoever called the tokenizer last.
            content = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
        else:
            content = [self._tokenizer.get_vocab(), self.encode([_PROBE])[0].tolist()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_remote(name: str) -> bool:
    """Whether a tokenizer is looked for on the Hub: it is not 'bytes' and there is no such path."""
    return name != BYTES and not Path(name).expanduser().exists()


def load_encoder(name: str, offline: bool = False) -> Encoder:
    """The encoder of a name.

    Args:
        name: "bytes", a directory, or a name on the Hub.
        offline: Never go online, as everything is in the cache already.

    Raises:
        DataError: It cannot be loaded.
    """
    return ByteEncoder() if name == BYTES else HuggingFaceEncoder(name, offline)


def smallest_type(vocabulary_size: int) -> TokenType:
    """The smallest type that holds all token ids below ``vocabulary_size``."""
    if vocabulary_size <= 1 << 16:
        return "uint16"
    return "uint32" if vocabulary_size <= 1 << 32 else "int64"


def _load(name: str, offline: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            f"tokenizer {name!r}: Hugging Face tokenizers need transformers, which is not installed: "
            "pip install 'dataloader-dispatch[hf]'; or use --tokenizer bytes"
        ) from error
    local = not is_remote(name)
    place = str(Path(name).expanduser()) if local else name
    if local and not Path(place).is_dir():
        raise DataError(f"tokenizer {name!r} is a file; name the directory that holds the tokenizer's files")
    try:
        # False, not None: with code beside the tokenizer transformers would ask whether to run it.
        return AutoTokenizer.from_pretrained(
            place, local_files_only=local or offline, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        where = "in that directory" if local else "on the Hugging Face Hub or in its cache, nor a directory"
        raise DataError(
            f"tokenizer {name!r} cannot be loaded; there is none {where}, or its files are damaged: {error}"
        ) from error
