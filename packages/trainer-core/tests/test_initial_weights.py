"""A run may begin with the weights of a directory; its own checkpoints come before them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint_core import CheckpointError
from trainer_core import Trainer

MakeTrainer = Callable[..., Trainer]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [value.detach().clone() for value in trainer.unwrapped_model().state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def exported(make_trainer: MakeTrainer, tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    """Weights of another seed, and the directory that holds them."""
    other = make_trainer(output_dir=str(tmp_path / "other"), seed=8)
    other.save_model(str(tmp_path / "weights"))
    return tmp_path / "weights", weights(other)


@pytest.mark.parametrize("where", ["default", "meta"])
def test_a_fresh_run_begins_with_them(
    make_trainer: MakeTrainer, tmp_path: Path, exported: tuple[Path, list[torch.Tensor]], where: str
) -> None:
    directory, expected = exported
    drawn = make_trainer(output_dir=str(tmp_path / "drawn"))
    given = make_trainer(
        output_dir=str(tmp_path / "given"),
        construct_model_on=where,
        with_trainer={"initial_weights": directory},
    )
    assert same(weights(given), expected)
    assert not same(weights(drawn), expected)


def test_a_checkpoint_of_the_run_comes_first(
    make_trainer: MakeTrainer, tmp_path: Path, exported: tuple[Path, list[torch.Tensor]]
) -> None:
    options = {"output_dir": str(tmp_path / "run"), "save_strategy": "steps"}
    first = make_trainer(**options, max_steps=2, save_steps=2, with_trainer={"initial_weights": exported[0]})
    first.train()
    second = make_trainer(**options, max_steps=2, save_steps=2, with_trainer={"initial_weights": exported[0]})
    second.train()
    assert second.state.session_start_step == 2
    assert same(weights(second), weights(first))


def test_a_directory_without_weights_is_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(
        output_dir=str(tmp_path / "run"), with_trainer={"initial_weights": tmp_path / "nowhere"}
    )
    with pytest.raises(CheckpointError, match="nowhere"):
        trainer.unwrapped_model()
