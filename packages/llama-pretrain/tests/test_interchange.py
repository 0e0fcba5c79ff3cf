"""Weights on disk: what is written is read, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_core import CheckpointError
from llama_pretrain import Llama, LlamaConfig, load_pretrained, save_pretrained
from trainer_core import ConfigurationError


def test_a_model_comes_back(small_model: Llama, tmp_path: Path) -> None:
    save_pretrained(small_model, tmp_path / "new" / "export")
    loaded = load_pretrained(tmp_path / "new" / "export")
    assert loaded.config == small_model.config
    for name, value in small_model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == small_model.config.tie_word_embeddings


def test_files_that_do_not_fit_the_configuration_are_refused(small_model: Llama, tmp_path: Path) -> None:
    save_pretrained(small_model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight"):
        load_pretrained(tmp_path)


def test_missing_and_damaged_files_are_named(
    small_config: Callable[..., LlamaConfig], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load_pretrained(tmp_path)
    small_config().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_pretrained(tmp_path)


def test_weights_that_are_there_are_not_replaced(small_model: Llama, tmp_path: Path) -> None:
    save_pretrained(small_model, tmp_path)
    with pytest.raises(CheckpointError, match="exists"):
        save_pretrained(small_model, tmp_path)
    with pytest.raises(ConfigurationError, match="dtype='int8'"):
        save_pretrained(small_model, tmp_path / "other", dtype="int8")
    assert not (tmp_path / "other").exists()


def test_a_dtype_that_cannot_hold_a_weight_is_refused(small_model: Llama, tmp_path: Path) -> None:
    with torch.no_grad():
        small_model.model.norm.weight[3] = 70000.0
    with pytest.raises(ConfigurationError, match=r"dtype='float16'.*65504, and model\.norm\.weight"):
        save_pretrained(small_model, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()
    save_pretrained(small_model, tmp_path / "brain", dtype="bfloat16")
    assert load_pretrained(tmp_path / "brain").model.norm.weight[3] == 70144.0


def test_one_weight_of_another_dtype_is_cast(small_model: Llama, tmp_path: Path) -> None:
    small_model.model.norm.to(torch.bfloat16)
    save_pretrained(small_model, tmp_path, dtype="float32")
    (file,) = tmp_path.glob("*.safetensors")
    header = json.loads(file.read_bytes()[8:].partition(b"}}")[0] + b"}}")
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}
