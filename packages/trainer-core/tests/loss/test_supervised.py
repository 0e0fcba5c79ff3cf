"""Losses of classes and numbers in a run, and what the losses refuse before an update is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_core import (
    CausalLMLoss,
    ClassificationLoss,
    ConfigurationError,
    FusedLinearCrossEntropy,
    MeanLoss,
    RegressionLoss,
    Trainer,
    TrainingArguments,
    ignored_like,
    is_ignored,
)

FEATURES = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
CLASSES = FEATURES[:, :3].argmax(dim=-1)
WEIGHT = (0.05, 0.1, 0.02)


class Linear(nn.Module):
    """One layer, and no token anywhere."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def rows(labels: Tensor) -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": label} for x, label in zip(FEATURES, labels, strict=True)]


def trainer(folder: Path, labels: Tensor, outputs: int = 3, **options: object) -> Trainer:
    settings = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 3,
    }
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        seed=1,
        logging_steps=1,
        save_strategy="no",
        num_train_epochs=3,
        dataloader_shuffle=False,
        lr_scheduler_type="constant",
        **settings,  # type: ignore[arg-type]
    )
    sgd = (torch.optim.SGD, {"lr": 0.3})
    return Trainer(
        args,
        model_init=lambda: Linear(outputs),
        train_dataset=rows(labels),
        eval_dataset=rows(labels),
        optimizer_cls_and_kwargs=sgd,
        callbacks=[],
        **options,  # type: ignore[arg-type]
    )


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, weight=torch.tensor(WEIGHT))


def several(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, labels)


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(logits[:, 0], labels)


RUNS = {
    "classes": (ClassificationLoss(), CLASSES, 3, functional.cross_entropy),
    # Weights this small add up to less than 1 in a step.
    "weighted classes": (ClassificationLoss(weight=WEIGHT), CLASSES, 3, weighted),
    "a weighted mean": (MeanLoss(weighted, lambda y: torch.tensor(WEIGHT)[y].sum()), CLASSES, 3, weighted),
    "numbers": (RegressionLoss(), FEATURES.sum(-1), 1, squared),
    "several classes": (
        RegressionLoss(functional.binary_cross_entropy_with_logits),
        (FEATURES[:, :3] > 0).float(),
        3,
        several,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    loss, labels, outputs, function = RUNS[name]
    run = trainer(tmp_path, labels, outputs, compute_loss_func=loss)
    run.train()
    torch.manual_seed(1)
    model, losses = Linear(outputs), []
    for _ in range(3):
        for start in range(0, 21, 6):  # two microbatches of 3, and what is left
            value = function(model(FEATURES[start : start + 6]), labels[start : start + 6])
            losses.append(value.item())
            model.zero_grad()
            value.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.3 * parameter.grad
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)
    # What counts, or its weights, also where each log entry has less than 1.
    assert run.state.log_history[-1]["total_tokens"] == pytest.approx(3 * loss.count(labels).item())
    expected = function(model(FEATURES), labels).item()
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (CLASSES, "labels are int64 [3]"),
        (FEATURES, "labels are float32 [3, 4]"),
        (CLASSES[:, None], "logits are float32 [3, 3] and the labels int64 [3, 1]"),
    ],
)
def test_the_default_loss_refuses_what_is_no_next_token_before_an_update(
    tmp_path: Path, labels: Tensor, found: str
) -> None:
    run = trainer(tmp_path, labels)
    before = [value.clone() for value in run.unwrapped_model().parameters()]
    for call in (run.train, run.evaluate):
        with pytest.raises(ConfigurationError, match=r"ClassificationLoss\(\).*RegressionLoss\(\)") as error:
            call()
        assert found in str(error.value)
    assert all(map(torch.equal, before, run.unwrapped_model().parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_target_that_is_not_a_number_shows_in_the_loss_unless_it_marks_padding(dtype: torch.dtype) -> None:
    zero = torch.zeros((), dtype=dtype)
    for wrong in (torch.tensor(float("nan"), dtype=dtype), zero / zero, -(zero / zero), (zero - 1).sqrt()):
        labels = torch.stack([zero, wrong, *ignored_like(torch.ones(2, dtype=dtype))])
        assert is_ignored(labels).tolist() == [False, False, True, True]
        loss = RegressionLoss()
        assert loss.count(labels) == 2
        assert loss(torch.ones(4), labels).isnan()
        assert loss(torch.ones(3), labels[[0, 2, 3]]) == 1
        skips = RegressionLoss(skip_nan=True)
        assert (skips.count(labels), skips(torch.ones(4), labels)) == (1, 1)


LOGITS, IDS = torch.randn(2, 5, 7), torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("loss", "predictions", "labels", "told"),
    [
        (CausalLMLoss(), LOGITS, IDS[:, :4], "logits are float32"),
        (CausalLMLoss(), LOGITS[..., None], IDS, "logits are float32"),
        (CausalLMLoss(), LOGITS, IDS.bool(), "labels are bool"),
        (FusedLinearCrossEntropy(nn.Linear(7, 9)), LOGITS[0], IDS[0], "labels are int64"),
        (ClassificationLoss(), LOGITS, IDS[0], "logits with the shape of the labels"),
        (ClassificationLoss(), LOGITS.movedim(-1, 1), IDS, "set class_dim"),
        (ClassificationLoss(class_dim=3), LOGITS, IDS, "set class_dim"),
        (ClassificationLoss(), LOGITS[..., :1], IDS, "two classes or more"),
        (ClassificationLoss(), LOGITS, IDS.byte(), "signed integer"),
        (ClassificationLoss(), LOGITS, LOGITS, "RegressionLoss"),
        (ClassificationLoss(weight=[1.0, 2.0]), LOGITS, IDS, "7 classes"),
        (RegressionLoss(), LOGITS[:, :1], LOGITS, "broadcast"),
        (RegressionLoss(), LOGITS, LOGITS[..., None], "broadcast"),
        (RegressionLoss(), LOGITS, IDS, "ClassificationLoss"),
        (RegressionLoss(lambda x, y, reduction: (x - y).sum()), LOGITS, LOGITS, "reduction='none'"),
    ],
)
def test_what_a_loss_cannot_tell_apart_is_refused_by_name(
    loss: Callable[..., Tensor], predictions: Tensor, labels: Tensor, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        loss(predictions, labels)


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 1.5}, {"weight": [1.0, -1.0]}, {"weight": [[1.0]]}, {"weight": [float("nan")]}],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        ClassificationLoss(**options)  # type: ignore[arg-type]


def test_bytes_are_tokens_like_any_other() -> None:
    """As an unsigned byte, -100 is 156."""
    labels = torch.tensor([[3, 156, 200, 156]])
    logits = torch.randn(1, 4, 256)
    loss = CausalLMLoss()
    assert loss.count(labels.byte()) == loss.count(labels) == 3
    torch.testing.assert_close(loss(logits, labels.byte()), loss(logits, labels))


def test_examples_with_one_label_count_the_tokens_that_are_read(tmp_path: Path) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return (self.embed(input_ids) * attention_mask[..., None]).mean(dim=1)

    mask = torch.tensor([1, 1, 1, 1, 0])
    data = [{"input_ids": torch.arange(5), "attention_mask": mask, "labels": torch.tensor(1)}] * 6
    args = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        save_strategy="no",
        logging_steps=3,
        per_device_train_batch_size=2,
    )
    run = Trainer(
        args, model_init=Bag, train_dataset=data, compute_loss_func=ClassificationLoss(), callbacks=[]
    )
    run.train()
    entry = run.state.log_history[0]
    assert (entry["tokens"], entry["input_tokens"], entry["compute_tokens"]) == (6, 24, 30)
