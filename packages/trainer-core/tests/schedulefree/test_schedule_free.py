"""schedulefree: the average is what is scored, saved and left, and training continues from what it had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch import Tensor, nn

from checkpoint_core import load_model_weights
from trainer_core import ConfigurationError, Trainer

FREE = {
    "optim": "schedule_free_adamw",
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "max_steps": 8,
    "num_train_epochs": -1,
}


class Record:
    """What training has after the last step, and the average that its optimizer computes of it."""

    def __init__(self) -> None:
        self.trained: list[Tensor] = []
        self.average: list[Tensor] = []

    def on_step_end(
        self,
        args: object,
        state: object,
        control: object,
        *,
        model: nn.Module,
        optimizer: object,
        **_: object,
    ) -> None:
        self.trained = copies(model)
        beta = optimizer.param_groups[0]["betas"][0] if "betas" in optimizer.param_groups[0] else 0.9
        self.average = [
            value.lerp(optimizer.state[p]["z"], 1 - 1 / beta)
            for value, p in zip(self.trained, model.parameters(), strict=True)
        ]


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


def stored(path: Path, model: nn.Module) -> list[Tensor]:
    load_model_weights(model, path)
    return copies(model)


def losses(trainer: Trainer) -> list[object]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_average_is_used_and_the_rest_continues(
    make_trainer: Callable[..., Trainer], ragged_loader, tiny_model, tmp_path: Path
) -> None:
    record = Record()
    saving = {
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": None,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = make_trainer(callbacks=[record], eval_loader=ragged_loader(seed=5), **FREE, **saving)
    trainer.train()
    assert isinstance(trainer.optimizer, AdamWScheduleFree)
    assert trainer.lr_scheduler is None
    assert_same(copies(trainer.model), record.average)
    assert_same(stored(tmp_path / "run" / "checkpoint-8", tiny_model()), record.average)
    trainer.save_model(str(tmp_path / "training"), averaged=False)
    assert_same(stored(tmp_path / "training", tiny_model()), record.trained)
    plain = make_trainer(output_dir=str(tmp_path / "plain"), **FREE)
    plain.train()
    assert losses(plain) == losses(trainer), "evaluations and checkpoints leave the curve as it is"
    resumed = make_trainer(
        output_dir=str(tmp_path / "resumed"),
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"),
        **FREE,
    )
    resumed.train()
    assert losses(resumed) == losses(trainer)
    assert_same(copies(resumed.model), copies(trainer.model))


def test_the_curve_is_that_of_a_plain_loop(make_trainer, tiny_model, ragged_loader) -> None:
    trainer = make_trainer(**FREE, optim_kwargs={"r": 1.0}, weight_decay=0.1, max_grad_norm=0.5)
    trainer.train()
    torch.manual_seed(7)
    model = tiny_model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = AdamWScheduleFree(groups, lr=1e-2, warmup_steps=3, r=1.0)
    optimizer.train()
    batches = [*ragged_loader(), *ragged_loader()]
    for batch in batches[:8]:
        logits = model(batch["input_ids"])[:, :-1]
        targets = batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        optimizer.zero_grad()
        (loss / (targets != -100).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    optimizer.eval()
    for (name, one), other in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_one_of_your_own_is_switched_too(make_trainer) -> None:
    record = Record()
    trainer = make_trainer(
        callbacks=[record],
        max_steps=4,
        num_train_epochs=-1,
        lr_scheduler_type="",
        warmup_steps=0,
        learning_rate=5e-5,
        with_trainer={"optimizer_cls_and_kwargs": (SGDScheduleFree, {"lr": 0.5})},
    )
    trainer.train()
    assert_same(copies(trainer.model), record.average)


def test_options_change_at_a_resume_where_that_is_allowed(make_trainer) -> None:
    saving = {**FREE, "save_strategy": "steps", "optim_kwargs": {"r": 1.0}}
    make_trainer(**{**FREE, "save_strategy": "steps", "max_steps": 4}).train()
    with pytest.raises(ConfigurationError, match=r"optim_kwargs=\{'r': 1.0\} was \{\} when"):
        make_trainer(**saving).train()
    resumed = make_trainer(**saving, allow_changes=("optim_kwargs",))
    resumed.train()
    group = resumed.optimizer.param_groups[0]
    assert (group["r"], group["k"]) == (1.0, 8), "the count goes on"


def test_a_schedule_beside_it_is_refused(make_trainer) -> None:
    for schedule in ("linear", "cosine", "reduce_lr_on_plateau"):
        with pytest.raises(ConfigurationError, match=rf"lr_scheduler_type='{schedule}' changes the learning"):
            make_trainer(
                **{**FREE, "lr_scheduler_type": schedule, "eval_strategy": "steps", "warmup_steps": 0}
            )
    factory = {"lr_scheduler_factory": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    with pytest.raises(ConfigurationError, match="lr_scheduler_factory"):
        make_trainer(**FREE, with_trainer=factory)
    with pytest.raises(ConfigurationError, match=r"ema_decay=0.9 excludes optim='schedule_free_adamw'"):
        make_trainer(**FREE, ema_decay=0.9)
    with pytest.raises(ConfigurationError, match="fuse_optim_with_backward=True excludes optim"):
        make_trainer(**FREE, fuse_optim_with_backward=True)
    with pytest.raises(ConfigurationError, match=r"adam_beta1=0 must be above 0"):
        make_trainer(**FREE, adam_beta1=0)
