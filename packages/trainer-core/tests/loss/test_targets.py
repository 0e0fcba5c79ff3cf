"""Losses that are given targets, made once from whole rows, before anything is cut."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dist_env import ParallelLayout
from trainer_core import (
    CausalLMLoss,
    ClassificationLoss,
    ConfigurationError,
    FusedLinearCrossEntropy,
    MeanLoss,
    ModelLoss,
    RegressionLoss,
    TargetLoss,
    TokenLoss,
    Trainer,
    TrainingArguments,
    count_next_tokens,
)
from trainer_core.loss import check_takes_targets, loss_of, takes_targets

ROWS, LENGTH, CLASSES, FEATURES = 3, 11, 7, 5


def _labels() -> Tensor:
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels[0, :4], labels[1, -3:], labels[2, 5] = -100, -100, -100
    return labels


def _logits() -> Tensor:
    return torch.randn(ROWS, LENGTH, CLASSES, generator=torch.Generator().manual_seed(2))


def _head() -> nn.Linear:
    head = nn.Linear(FEATURES, CLASSES)
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
    return head


def _hidden() -> Tensor:
    return torch.randn(ROWS, LENGTH, FEATURES, generator=torch.Generator().manual_seed(4))


CASES: dict[str, tuple[TargetLoss, Tensor, Tensor]] = {
    "next token": (CausalLMLoss(), _logits(), _labels()),
    "next token, smoothed": (CausalLMLoss(label_smoothing=0.1, z_loss=0.01), _logits(), _labels()),
    "fused": (FusedLinearCrossEntropy(_head(), backend="chunked", chunk_tokens=4), _hidden(), _labels()),
    "classes": (ClassificationLoss(weight=[1.0, 2.0, 0.5, 1.0, 0.1, 3.0, 1.0]), _logits(), _labels()),
    "numbers": (RegressionLoss(), _logits()[..., 0], _logits()[..., 1]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(), (1,), (4, 5), tuple(range(1, LENGTH))], ids=str)
def test_rows_of_targets_can_be_cut_anywhere(name: str, cuts: tuple[int, ...]) -> None:
    """Where labels are cut instead, a next-token loss loses the target behind each cut."""
    loss, predictions, labels = CASES[name]
    assert takes_targets(loss)
    targets = loss.make_targets(labels)
    assert targets.shape == labels.shape
    bounds = [0, *cuts, LENGTH]
    parts = [
        loss.on_targets(predictions[:, begin:end], targets[:, begin:end]) for begin, end in pairwise(bounds)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), loss(predictions, labels))


def test_targets_are_the_labels_that_follow() -> None:
    labels = torch.tensor([[3, 1, 156, 2]], dtype=torch.uint8)
    assert CausalLMLoss().make_targets(labels).tolist() == [[1, 156, 2, -100]]
    assert CausalLMLoss().make_targets(torch.tensor([[3]])).tolist() == [[-100]]
    assert CausalLMLoss().make_targets(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0)
    with pytest.raises(ConfigurationError, match=r"the labels are float32 \[2, 3\]"):
        CausalLMLoss().make_targets(torch.ones(2, 3))


class TokensSeen:
    """A loss of targets that keeps what it is given."""

    def __init__(self) -> None:
        self.labels: list[Tensor] = []
        self.targets: list[Tensor] = []

    def count(self, labels: Tensor) -> Tensor:
        return count_next_tokens(labels)

    def make_targets(self, labels: Tensor) -> Tensor:
        self.labels.append(labels)
        return labels.roll(-1, dims=-1)

    def on_targets(self, predictions: object, targets: Tensor) -> Tensor:
        assert isinstance(predictions, Tensor)
        self.targets.append(targets)
        return functional.cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="sum")

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        raise AssertionError("a loss that takes targets is not given labels")


class LabelsSeen(CausalLMLoss):
    """Inherits what takes targets, and computes in a way of its own from labels."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[Tensor] = []

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        self.labels.append(labels)
        return super().__call__(predictions, labels)


class PredictsItself(CausalLMLoss):
    """Inherits what takes targets, and runs the model in a way of its own with labels."""

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        return model(**inputs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(input_ids))
        return logits


IDS = torch.randint(0, CLASSES, (6, LENGTH), generator=torch.Generator().manual_seed(5))


def _trainer(folder: Path, loss: TokenLoss, **more: object) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        per_device_eval_batch_size=3,
        save_strategy="no",
        logging_steps=1,
    )
    data = [{"input_ids": row, "labels": row} for row in IDS]
    return Trainer(args, model=Model(), train_dataset=data, compute_loss_func=loss, **more)  # type: ignore[arg-type]


def test_a_loss_that_declares_it_is_given_targets_and_metrics_are_given_labels(tmp_path: Path) -> None:
    loss, seen = TokensSeen(), []

    def metric(predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(labels)
        return labels.sum(), torch.tensor(1)

    trainer = _trainer(tmp_path, loss, eval_dataset=[{"input_ids": row, "labels": row} for row in IDS],
                       eval_metrics={"sum": metric})  # fmt: skip
    trainer.train()
    assert trainer.loss is loss
    assert [list(labels.shape) for labels in loss.labels] == [[2, LENGTH]] * 3
    assert torch.equal(torch.cat(loss.targets), torch.cat(loss.labels).roll(-1, dims=-1))
    loss.targets.clear()
    result = trainer.evaluate()
    assert torch.equal(torch.cat(loss.targets), IDS.roll(-1, dims=-1))
    assert torch.equal(torch.cat(seen), IDS)
    assert result["eval_tokens"] == 6 * (LENGTH - 1)


class Shorter(TokensSeen):
    """Shifts by leaving the first label out, as loops of one's own do."""

    def make_targets(self, labels: Tensor) -> Tensor:
        return labels[:, 1:]


def test_targets_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Shorter.*targets of shape \[2, 10\] from labels of shape \[2, 11\]"
    ):
        _trainer(tmp_path, Shorter()).train()


def test_a_loss_with_a_call_of_its_own_is_given_labels(tmp_path: Path) -> None:
    loss = LabelsSeen()
    trainer = _trainer(tmp_path / "own", loss)
    trainer.train()
    assert sorted(map(tuple, torch.cat(loss.labels).tolist())) == sorted(map(tuple, IDS.tolist()))
    assert not takes_targets(loss)
    assert not takes_targets(PredictsItself())


def test_layouts_that_cut_rows_refuse_a_loss_that_needs_them_whole(tiny_lm, settings) -> None:  # type: ignore[no-untyped-def]
    whole, cut = ParallelLayout(shard=2), ParallelLayout(context=2)
    mean = MeanLoss(functional.cross_entropy, count_next_tokens)
    for loss in (mean, ModelLoss(count=count_next_tokens), LabelsSeen(), PredictsItself()):
        check_takes_targets(loss, whole)
        with pytest.raises(ConfigurationError, match=f"compute_loss_func='{type(loss).__name__}'.*cp=2"):
            check_takes_targets(loss, cut)
    for case in CASES.values():
        check_takes_targets(case[0], cut)
    declares = loss_of(settings(), tiny_lm(), None, lambda head: FusedLinearCrossEntropy(head))
    check_takes_targets(declares, cut)
    with pytest.raises(ConfigurationError, match="cp=2"):
        check_takes_targets(loss_of(settings(), tiny_lm(), None, lambda head: LabelsSeen()), cut)
