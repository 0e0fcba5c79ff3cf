"""The shape that settings and tokenizer make together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llama_pretrain import ByteTokenizer, LlamaConfig, PretrainArguments
from llama_pretrain.model_choice import model_config
from trainer_core import ConfigurationError


def test_a_preset_takes_the_vocabulary_of_the_tokenizer_or_the_one_asked_for() -> None:
    tokenizer = ByteTokenizer()
    assert model_config(PretrainArguments(), tokenizer).vocab_size == 320
    assert model_config(PretrainArguments(vocab_size=32000), tokenizer).vocab_size == 32000


def test_a_vocabulary_holds_every_id_of_the_tokenizer() -> None:
    with pytest.raises(ConfigurationError, match="vocab_size=200: is less than the 259 ids"):
        model_config(PretrainArguments(vocab_size=200), ByteTokenizer())


def test_a_directory_keeps_its_own_vocabulary(
    tmp_path: Path, small_config: Callable[..., LlamaConfig]
) -> None:
    small_config(vocab_size=300).save(tmp_path)
    args = PretrainArguments(model=str(tmp_path), sample_tokens=0)
    assert model_config(args, ByteTokenizer()).vocab_size == 300
    with pytest.raises(ConfigurationError, match="vocab_size=512: has no effect on the model in"):
        model_config(PretrainArguments(model=str(tmp_path), vocab_size=512), ByteTokenizer())
