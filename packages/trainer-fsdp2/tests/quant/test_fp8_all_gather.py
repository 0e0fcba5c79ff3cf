"""Weights that travel in float8 give the curve of weights that are rounded after they have travelled."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from warm_start import run_ranks

from trainer_core import ConfigurationError, Trainer, TrainingArguments
from trainer_fsdp2 import FSDP2Arguments, FSDP2TrainingArguments

WORKER = Path(__file__).with_name("ranks_of_fp8.py")


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    """The module that the ranks run."""
    spec = importlib.util.spec_from_file_location("ranks_of_fp8", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left."""
    directory = tmp_path_factory.mktemp("fp8")
    modules = ["trainer_fsdp2", "torchao.float8", "torch._dynamo"]
    run_ranks(2, [str(WORKER), str(directory)], modules, directory)
    return directory


def test_ranks_have_the_same_curve_and_restart(directory: Path) -> None:
    for rank in (0, 1):
        seen = json.loads((directory / f"seen-{rank}.json").read_text())
        assert len(seen["plain"]) == 6
        assert seen["float8, restarted"] == pytest.approx(seen["plain"], rel=1e-6)
        assert seen["plain"][-1] < seen["plain"][0]


def test_one_process_goes_on_from_their_checkpoint(directory: Path, worker: ModuleType) -> None:
    # Microbatches as on the ranks: their activations have one scale each.
    arguments = TrainingArguments(
        **worker.SETTINGS,
        output_dir=str(directory / "alone"),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    trainer = Trainer(arguments, model_init=worker.Model, train_dataset=worker.rows())
    trainer.train()
    plain = json.loads((directory / "seen-0.json").read_text())["plain"]
    assert trainer.state.session_start_step == 3
    assert worker.losses(trainer) == pytest.approx(plain, rel=1e-5)


def test_other_recipes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="fp8_all_gather=True needs fp8_recipe='tensorwise'"):
        FSDP2TrainingArguments(
            output_dir="x", fp8_recipe="rowwise", fsdp2=FSDP2Arguments(fp8_all_gather=True)
        )
