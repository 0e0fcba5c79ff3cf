"""What holds where torchao is not installed, or is and shall not be loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_core import ConfigurationError, TrainingArguments
from trainer_core.precision import (
    FP8_RECIPES,
    QAT_RECIPES,
    check_exclusive,
    convert_to_fp8,
    export_qat,
    prepare_qat,
)

MakeSettings = Callable[..., TrainingArguments]
CPU = torch.device("cpu")


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide torchao where it is installed."""
    kept = [folder for folder in sys.path if not (Path(folder) / "torchao").is_dir()]
    monkeypatch.setattr(sys, "path", kept)


@pytest.mark.usefixtures("without_torchao")
@pytest.mark.parametrize(
    ("convert", "name", "recipe"),
    [(convert_to_fp8, "fp8_recipe", recipe) for recipe in FP8_RECIPES]
    + [(prepare_qat, "qat_recipe", recipe) for recipe in QAT_RECIPES],
)
def test_missing_torchao_is_said(
    settings: MakeSettings, convert: Callable[..., object], name: str, recipe: str
) -> None:
    message = rf"{name}='{recipe}' needs torchao.*pip install 'trainer-core\[quant\]'"
    with pytest.raises(ConfigurationError, match=message):
        convert(nn.Sequential(nn.Linear(32, 32)), settings(**{name: recipe}), CPU)


@pytest.mark.usefixtures("without_torchao")
def test_missing_torchao_is_said_at_the_export(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs torchao"):
        export_qat(nn.Linear(4, 4), "int8-weight-only", tmp_path / "artifact")


def test_import_loads_no_heavy_library() -> None:
    heavy = ("torchao", "safetensors", "transformers", "torch._dynamo", "torch._inductor")
    code = f"import sys, trainer_core.precision; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_recipes_are_refused(settings: MakeSettings) -> None:
    args = settings(fp8_recipe="rowwise")
    check_exclusive(args)
    object.__setattr__(args, "qat_recipe", "int8-weight-only")  # the arguments refuse this themselves
    with pytest.raises(
        ConfigurationError,
        match=r"fp8_recipe='rowwise' cannot be combined with qat_recipe='int8-weight-only'",
    ):
        check_exclusive(args)
