"""The quantized model as files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainer_core import ConfigurationError, DataError
from trainer_core.precision import (
    QAT_RECIPES,
    export_qat,
    export_qat_checkpoint,
    load_quantized,
    prepare_qat,
)

Trained = Callable[..., Any]
FIRST, *REST = QAT_RECIPES


@pytest.fixture
def trained(lab: Any) -> Trained:
    def make(recipe: str = "int8-weight-only", tied: bool = False, steps: int = 20) -> Any:
        args = lab.settings(qat_recipe=recipe)
        model = lab.model(tied)
        prepare_qat(model, args, lab.cpu)
        lab.train(model, args, steps)
        return model

    return make


@pytest.mark.parametrize(
    ("recipe", "tied"),
    [
        *((recipe, False) for recipe in QAT_RECIPES),
        (FIRST, True),
        *(pytest.param(recipe, True, marks=pytest.mark.full) for recipe in REST),
    ],
)
def test_loaded_model_generates_the_same(
    lab: Any, trained: Trained, tmp_path: Path, recipe: str, tied: bool
) -> None:
    model = trained(recipe, tied, steps=40)
    path = export_qat(model, recipe, tmp_path / "deep" / "artifact")
    assert sorted(file.name for file in path.iterdir()) == ["model.safetensors", "quantization.json"]
    loaded = load_quantized(path, lambda: lab.model(tied, seed=1))
    assert torch.equal(lab.generate(loaded), lab.generate(model))
    assert not loaded.training
    assert type(loaded.layers[0].q_proj.weight).__name__ == "IntxUnpackedToInt8Tensor"
    assert torch.equal(loaded.start, model.start)
    assert (loaded.lm_head.weight is loaded.embed.weight) is tied
    assert json.loads((path / "quantization.json").read_text())["tied"] == (
        {"lm_head.weight": "embed.weight"} if tied else {}
    )


def test_artifact_from_a_checkpoint(lab: Any, trained: Trained, tmp_path: Path) -> None:
    """A checkpoint of the training is an ordinary model; the recipe makes the rest."""
    model = trained("int8-dynamic-act-int4-weight")
    (tmp_path / "checkpoint").mkdir()
    save_file(model.state_dict(), tmp_path / "checkpoint" / "model.safetensors")
    path = export_qat_checkpoint(
        tmp_path / "checkpoint", "int8-dynamic-act-int4-weight", tmp_path / "artifact", lab.model
    )
    loaded = load_quantized(path, lab.model)
    assert torch.equal(lab.generate(loaded), lab.generate(model))


def test_quantized_weights_take_a_byte(trained: Trained, tmp_path: Path) -> None:
    path = export_qat(trained(), "int8-weight-only", tmp_path / "artifact")
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.get_tensor("layers.0.q_proj._weight_qdata").dtype == torch.int8
        assert "layers.0.q_proj.weight" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("embed.weight").dtype == torch.float32


def test_full_directory_is_refused_before_any_work(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigurationError, match=r"output_dir=.*not an empty directory"):
        export_qat(trained(steps=1), "int8-weight-only", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_empty_directory_is_taken(trained: Trained, tmp_path: Path) -> None:
    target = tmp_path / "artifact"
    target.mkdir()
    export_qat(trained(steps=1), "int8-weight-only", target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["artifact"], "nothing is left beside it"


def test_refused_model_leaves_nothing_behind(lab: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"was not\. Call prepare_qat"):
        export_qat(lab.model(), "int8-weight-only", tmp_path / "artifact")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_artifact_is_refused(lab: Any, trained: Trained, tmp_path: Path) -> None:
    good = export_qat(trained(tied=True, steps=1), "int8-weight-only", tmp_path / "good")
    description, weights = good / "quantization.json", good / "model.safetensors"

    def broken(name: str, change: Callable[[Path], object]) -> Path:
        path = tmp_path / name
        shutil.copytree(good, path)
        change(path)
        return path

    def described(**changes: object) -> Callable[[Path], object]:
        text = json.dumps({**json.loads(description.read_text()), **changes})
        return lambda path: (path / "quantization.json").write_text(text)

    def with_class(name: str) -> Callable[[Path], object]:
        with safe_open(weights, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            header = {k: v.replace("IntxUnpackedToInt8Tensor", name) for k, v in file.metadata().items()}
        return lambda path: save_file(tensors, path / "model.safetensors", metadata=header)

    cases = {
        "describes no quantized model": broken("bare", lambda path: (path / "quantization.json").unlink()),
        "JSONDecodeError": broken("text", lambda path: (path / "quantization.json").write_text("{")),
        "has format 2, but this version reads 1": broken("format", described(format=2)),
        "does not fit the TinyLlama: 'gone'": broken("tie", described(tied={"lm_head.weight": "gone"})),
        "Missing key": broken("untied", described(tied={})),
        "cannot be read: FileNotFoundError": broken(
            "none", lambda path: (path / "model.safetensors").unlink()
        ),
        "cannot be read: SafetensorError": broken(
            "torn", lambda path: (path / "model.safetensors").write_bytes(weights.read_bytes()[:-100])
        ),
        "Unsupported tensor type: os.system": broken("class", with_class("os.system")),
    }
    for message, path in cases.items():
        with pytest.raises(DataError, match=message):
            load_quantized(path, lambda: lab.model(tied=True))
    load_quantized(good, lambda: lab.model(tied=True))
