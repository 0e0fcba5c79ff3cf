"""The command `import` on a model in several files; written with the library that transformers brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llama_pretrain import ByteTokenizer, Llama, load_pretrained, save_pretrained
from llama_pretrain.cli import main


def _in_two_files(directory: Path) -> None:
    """Divide model.safetensors into two files with an index, as large models come."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, directory / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_model_in_several_files_becomes_one_with_the_same_logits(
    small_model: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    save_pretrained(small_model, source, tokenizer=ByteTokenizer())
    _in_two_files(source)
    assert main(["import", str(source), str(target)]) == 0
    assert (target / "model.safetensors").is_file()
    tokens = torch.arange(20).reshape(2, 10)
    assert torch.equal(load_pretrained(target)(tokens), small_model(tokens))
    said = capsys.readouterr().out
    assert f"--model {target} --tokenizer {target}" in said
