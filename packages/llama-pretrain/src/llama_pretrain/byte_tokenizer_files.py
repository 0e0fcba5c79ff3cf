"""Bytes as tokens in the files of the library `tokenizers`, so that others read them without this package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

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
