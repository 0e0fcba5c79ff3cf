"""Text to token ids and back: bytes, or any Hugging Face tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from trainer_core import ConfigurationError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

_BYTES_AS_CHARACTERS = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def write_byte_tokenizer(directory: Path, special_ids: Mapping[str, int]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: ids 0 to 255 are bytes, the others are special.

    Args:
        directory: An existing directory.
        special_ids: Ids of `BOS`, `EOS` and `PAD`.
    """
    _write(directory / "tokenizer.json", _tokenizer(special_ids))
    # No bos_token: documents follow a separator in training and never begin with `BOS`. With it an evaluation
    # harness would put an id that the model has not seen before every text without context.
    # split_special_tokens: the text "<|eos|>" is seven bytes, like any other text.
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
        },
    )


def _tokenizer(special_ids: Mapping[str, int]) -> dict[str, object]:
    """Byte-pair encoding that merges nothing."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(text, token) for text, token in special_ids.items()],
        "normalizer": None,
        "pre_tokenizer": _BYTES_AS_CHARACTERS,
        "post_processor": None,
        "decoder": _BYTES_AS_CHARACTERS,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_character_of(byte): byte for byte in range(256)} | dict(special_ids),
            "merges": [],
        },
    }


def _special(text: str, token: int) -> dict[str, object]:
    sides = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": text, **sides, "special": True}


def _character_of(byte: int) -> str:
    """What the library shows for a byte: its own character, or one from U+0100 on if that cannot be seen."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if byte in seen:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in seen].index(byte))


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


BYTE_TOKENIZER_FILE = "byte_tokenizer.json"


@runtime_checkable
class Tokenizer(Protocol):
    """What this package asks of a tokenizer. No method ever adds special tokens by itself."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if there is one."""
        ...

    @property
    def eos_token_id(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills up a row, if there is one."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens are left out."""
        ...

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the tokenizer into an existing directory."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then begin (256), end (257) and padding (258)."""

    vocab_size = 259
    bos_token_id = 256
    eos_token_id = 257
    pad_token_id = 258

    def encode(self, text: str) -> bytes:
        """Return the UTF-8 bytes of `text`, which is a sequence of ids."""
        return text.encode("utf-8")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 show as U+FFFD, ids above 255 are left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write a small JSON file that says which tokenizer this is, and the files for transformers."""
        content = {"tokenizer": "byte", "vocab_size": self.vocab_size, "eos_token_id": self.eos_token_id}
        path = Path(directory) / BYTE_TOKENIZER_FILE
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_byte_tokenizer(
            Path(directory), {BOS: self.bos_token_id, EOS: self.eos_token_id, PAD: self.pad_token_id}
        )

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str]) -> ByteTokenizer:
        """Read what `save_pretrained` wrote.

        Raises:
            ConfigurationError: If the directory holds no byte tokenizer.
        """
        path = Path(directory) / BYTE_TOKENIZER_FILE
        if not path.is_file():
            raise ConfigurationError(
                "tokenizer",
                str(directory),
                f"contains no {BYTE_TOKENIZER_FILE}",
                "name a directory that has one",
            )
        return cls()


class HuggingFaceTokenizer:
    """A tokenizer of transformers that never adds special tokens by itself.

    A tokenizer that adds its own separator beside the loader's doubles it, which is seen only when a model is
    evaluated. So ids are made without special tokens, and the data pipeline adds one separator per document.

    Args:
        directory: A directory with tokenizer files. Nothing is fetched.

    Raises:
        ConfigurationError: If transformers is not installed, the directory holds no tokenizer, or the
            tokenizer has no end-of-text token.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigurationError(
                "tokenizer",
                str(directory),
                "needs transformers, which is not installed",
                "install it with `pip install 'llama-pretrain[hf]'`, or use --tokenizer byte",
            ) from error
        if not Path(directory).is_dir():
            raise ConfigurationError(
                "tokenizer",
                str(directory),
                "is neither 'byte' nor a directory",
                "name a directory with tokenizer files",
            )
        try:
            # False, not None: with code in the directory transformers would ask whether to run it.
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise ConfigurationError(
                "tokenizer",
                str(directory),
                f"cannot be read ({first_line})",
                "name a directory with tokenizer files",
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigurationError(
                "tokenizer",
                str(directory),
                "has no end-of-text token to separate documents",
                "set its eos_token",
            )

    @property
    def backend_tokenizer(self) -> object:
        """What a `DocumentStream` looks at to see whether texts can be cut; None for a slow tokenizer."""
        return getattr(self._tokenizer, "backend_tokenizer", None)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return len(self._tokenizer)

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, if there is one."""
        return _optional_id(self._tokenizer.bos_token_id)

    @property
    def eos_token_id(self) -> int:
        """Id that ends a document."""
        return int(self._tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills up a row, if there is one."""
        return _optional_id(self._tokenizer.pad_token_id)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` with no special token added. Long documents are not cut."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; special tokens are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the tokenizer's own files."""
        self._tokenizer.save_pretrained(str(directory))


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer by its setting.

    Args:
        name: `byte`, a directory that a `ByteTokenizer` was saved in, or one of a Hugging Face tokenizer.

    Raises:
        ConfigurationError: If it cannot be loaded.
    """
    if name == "byte" or (Path(name) / BYTE_TOKENIZER_FILE).is_file():
        return ByteTokenizer()
    return HuggingFaceTokenizer(name)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds a tokenizer that `load_tokenizer` may read."""
    names = (BYTE_TOKENIZER_FILE, "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((directory / name).is_file() for name in names)


def unit_of(tokenizer: Tokenizer) -> str:
    """What one id of a tokenizer stands for, in a word: byte or token."""
    return "byte" if isinstance(tokenizer, ByteTokenizer) else "token"


def _optional_id(value: int | None) -> int | None:
    return None if value is None else int(value)
