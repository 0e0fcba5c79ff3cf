"""The configuration: what it accepts, refuses and writes, and which one a run gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_pretrain import ByteTokenizer, Llama, LlamaConfig, PretrainArguments, preset, preset_names
from llama_pretrain.experiment import model_config
from trainer_core import ConfigurationError

MakeConfig = Callable[..., LlamaConfig]


def test_left_out_head_settings_follow_from_the_others() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize("tied", [False, True])
def test_the_dict_reads_back_equal(small_config: MakeConfig, tied: bool) -> None:
    config = small_config(tie_word_embeddings=tied, pad_token_id=2)
    assert LlamaConfig.from_dict(config.to_dict()) == config
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_dict_names_the_architecture_for_transformers(small_config: MakeConfig) -> None:
    values = small_config().to_dict()
    assert values["architectures"] == ["LlamaForCausalLM"]
    assert (values["model_type"], values["hidden_act"]) == ("llama", "silu")
    assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}


def test_both_generations_of_rope_settings_are_read() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    old = LlamaConfig.from_dict(shape | {"rope_theta": 500000.0, "rope_scaling": None})
    new = LlamaConfig.from_dict(shape | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 4}, ["num_key_value_heads=4", "divide num_attention_heads=6"]),
        ({"hidden_size": 50}, ["hidden_size=50", "multiple of num_attention_heads=6", "Use 54"]),
        ({"head_dim": 7}, ["head_dim=7", "even"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]),
        ({"vocab_size": "61"}, ["vocab_size='61'", "must be int"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "must be bool"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps=0.0", "above 0"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps=None", "must be float"]),
        ({"eos_token_id": 61}, ["eos_token_id=61", "below vocab_size=61"]),
    ],
)
def test_a_broken_rule_is_named(
    small_config: MakeConfig, changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        small_config(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"attention_bias": True}, ["attention_bias=True", "only False"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"model_type": "mistral"}, ["model_type='mistral'"]),
        ({"sliding_window": 128}, ["sliding_window=128", "cannot represent"]),
        ({"eos_token_id": [1, 2]}, ["eos_token_id=[1, 2]"]),
    ],
)
def test_what_the_model_does_not_compute_is_refused(
    small_config: MakeConfig, extra: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LlamaConfig.from_dict(small_config().to_dict() | extra)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "content", [None, "{not json", "[1]", '{"hidden_size": 7, "num_attention_heads": 2}']
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        LlamaConfig.load(tmp_path)


def test_a_saved_file_loads(small_config: MakeConfig, tmp_path: Path) -> None:
    config = small_config()
    assert config.save(tmp_path) == tmp_path / "config.json"
    assert LlamaConfig.load(tmp_path) == config


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "kv_heads", "ffn", "billions"),
    [
        ("160m", 16, 768, 12, 12, 2048, 0.162),
        ("1b", 22, 2048, 32, 4, 5632, 1.100),
        ("7b", 32, 4096, 32, 32, 11008, 6.738),
        ("13b", 40, 5120, 40, 40, 13824, 13.016),
        ("34b", 48, 8192, 64, 8, 22016, 33.744),
        ("70b", 80, 8192, 64, 8, 28672, 68.977),
    ],
)
def test_presets_have_the_published_shapes(
    name: str, layers: int, width: int, heads: int, kv_heads: int, ffn: int, billions: float
) -> None:
    config = preset(name)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, width, ffn)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert (config.vocab_size, config.max_position_embeddings) == (32000, 4096)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(config).parameters())
    assert parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"model='160'.*Did you mean '160m'.*70b"):
        preset("160")
    assert preset_names()[0] == "tiny"
    assert preset("tiny", vocab_size=32000).vocab_size == 32000


def test_a_preset_takes_the_vocabulary_of_the_tokenizer_or_the_one_asked_for() -> None:
    tokenizer = ByteTokenizer()
    assert model_config(PretrainArguments(), tokenizer).vocab_size == 320
    assert model_config(PretrainArguments(vocab_size=32000), tokenizer).vocab_size == 32000


def test_a_vocabulary_holds_every_id_of_the_tokenizer() -> None:
    with pytest.raises(ConfigurationError, match="vocab_size=200 is less than the 259 ids"):
        model_config(PretrainArguments(vocab_size=200), ByteTokenizer())


def test_a_directory_keeps_its_own_vocabulary(
    tmp_path: Path, small_config: Callable[..., LlamaConfig]
) -> None:
    small_config(vocab_size=300).save(tmp_path)
    args = PretrainArguments(model=str(tmp_path), sample_tokens=0)
    assert model_config(args, ByteTokenizer()).vocab_size == 300
    with pytest.raises(ConfigurationError, match="vocab_size=512 has no effect on the model in"):
        model_config(PretrainArguments(model=str(tmp_path), vocab_size=512), ByteTokenizer())
