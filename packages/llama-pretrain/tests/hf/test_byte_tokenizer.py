"""The byte tokenizer as transformers reads it; run with the extra `hf`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from llama_pretrain import ByteTokenizer, HuggingFaceTokenizer, Llama, LlamaConfig, save_pretrained
from trainer_core import ConfigurationError

OURS = ByteTokenizer()
EVERY_CHARACTER = [code for code in range(0x110000) if not 0xD800 <= code <= 0xDFFF]
MANY = "".join(map(chr, random.Random(0).choices(EVERY_CHARACTER, k=3000)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("model")
    config = LlamaConfig(vocab_size=320, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    save_pretrained(Llama(config), directory, tokenizer=OURS)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.mark.parametrize(
    "text", ["", "plain", " a  b\r\n\n\tc ", "naïve ≤ 1 🦙", "\x00\x7f", "n't , .", "<|eos|><|bos|>", MANY]
)
def test_ids_and_texts_agree(theirs: PreTrainedTokenizerBase, text: str) -> None:
    ids = theirs(text)["input_ids"]
    assert ids == list(OURS.encode(text))
    assert theirs.decode(ids, skip_special_tokens=True) == text


def test_special_ids_agree(theirs: PreTrainedTokenizerBase) -> None:
    assert len(theirs) == OURS.vocab_size
    assert (theirs.eos_token_id, theirs.pad_token_id) == (OURS.eos_token_id, OURS.pad_token_id)
    assert theirs.convert_tokens_to_ids("<|bos|>") == OURS.bos_token_id
    for ids in ([256, 104, 105, 257, 258], [0xC3, 104], [0xF0, 0x9F, 0xA6, 65, 0xFF]):
        assert theirs.decode(ids, skip_special_tokens=True) == OURS.decode(ids)


def test_what_transformers_saves_again_is_the_same_tokenizer(
    theirs: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    theirs.save_pretrained(tmp_path)
    again = HuggingFaceTokenizer(tmp_path)
    assert again.encode(MANY) == list(OURS.encode(MANY))
    assert (again.vocab_size, again.eos_token_id) == (OURS.vocab_size, OURS.eos_token_id)


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked whether to run it: a pipe into the command might answer."""
    monkeypatch.setattr("builtins.input", lambda text="": "y")
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    named = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ConfigurationError, match="contains custom code"):
        HuggingFaceTokenizer(tmp_path)
    assert not ran.exists()
