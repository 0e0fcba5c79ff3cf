"""Bytes as tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_pretrain import ByteTokenizer, Tokenizer, load_tokenizer
from trainer_core import ConfigurationError


@pytest.mark.parametrize("text", ["", "plain", "naïve ≤ 1\n\t🦙", "\x00\x7f"])
def test_text_comes_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = list(tokenizer.encode(text))
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_ids_are_left_out_of_text_and_broken_bytes_show() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 104, 105, 257, 258]) == "hi"
    assert tokenizer.decode([0xC3, 104]) == "\ufffdh"
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert special == set(range(256, tokenizer.vocab_size))


def test_it_is_saved_and_found_again(tmp_path: Path) -> None:
    assert isinstance(ByteTokenizer(), Tokenizer)
    with pytest.raises(ConfigurationError, match=r"byte_tokenizer\.json"):
        ByteTokenizer.from_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    assert isinstance(ByteTokenizer.from_pretrained(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)
