"""A run that continues from any of its checkpoints takes the same steps, to the last bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from equivalence.data import RaggedLoader
from equivalence.model import Decoder
from equivalence.reference import Recipe
from equivalence.training import curve, settings_of

from trainer_core import Trainer, TrainingArguments

RECIPE = Recipe(steps=24)  # more than three epochs
FULL = bool(os.environ.get("FULL_TESTS"))
KINDS = {
    "AdamW": {},
    "in backward": {
        "fuse_optim_with_backward": True,
        "max_grad_norm": None,
        "gradient_accumulation_steps": 1,
    },
    "Muon, averaged": {"optim": "muon", "ema_decay": 0.9},
    "schedule-free": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant_with_warmup"},
}


def trainer_of(directory: Path, **settings: object) -> Trainer:
    """One block with dropout, so that random generators matter; four microbatches of a step."""
    args = {**settings_of(RECIPE), "gradient_accumulation_steps": 4, "output_dir": str(directory), **settings}
    return Trainer(
        TrainingArguments(per_device_train_batch_size=2, **args),  # type: ignore[arg-type]
        model_init=lambda: Decoder(dropout=0.2, blocks=1),
        train_dataset=RaggedLoader(2),
        callbacks=[],
    )


def final_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all weights, and of both moments of the optimizer."""
    model, optimizer = trainer.unwrapped_model(), trainer.optimizer
    assert optimizer is not None
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = value.clone()
    return found


# In each epoch, at its end and elsewhere; from every step in `nox -s full`.
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("AdamW", range(1, 24) if FULL else (1, 6, 7, 8, 14, 18, 23)),
        ("in backward", (1, 7, 11, 14, 18, 23)),
        ("Muon, averaged", (1, 7, 11)),
        ("schedule-free", (1, 7, 11)),
    ],
)
def test_resume_is_exact(kind: str, steps: Sequence[int], tmp_path: Path) -> None:
    settings = {**KINDS[kind]}
    whole = trainer_of(
        tmp_path / "whole", save_strategy="steps", save_steps=1, save_total_limit=None, **settings
    )
    whole.train()
    points, state = curve(whole.state.log_history), final_state(whole)
    assert len(points) == RECIPE.steps
    for step in steps:
        part = trainer_of(
            tmp_path / "part",
            resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"),
            **settings,
        )
        part.train()
        assert part.state.session_start_step == step
        assert curve(part.state.log_history) == points, f"resumed at step {step}"
        found = final_state(part)
        assert found.keys() == state.keys()
        off = [name for name, value in state.items() if not torch.equal(found[name], value)]
        assert not off, f"resumed at step {step}"
