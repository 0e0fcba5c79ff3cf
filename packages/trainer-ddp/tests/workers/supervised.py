"""Ranks that train classifiers and regressors on batches that do not come out even, and note the curves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tiny import settings, write_notes
from torch import Tensor, nn
from torch.nn import functional

from dist_env import DistributedEnvInterface, DistributedEnvironment
from trainer_core import ClassificationLoss, MeanLoss, RegressionLoss, TokenLoss
from trainer_ddp import DDPTrainer, DDPTrainingArguments

ROWS, SIZE, EPOCHS = 13, 2, 1
FEATURES = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
CLASSES = FEATURES[:, :3].argmax(dim=-1)
WEIGHT = torch.tensor([0.03, 0.02, 0.05])


def missing(labels: Tensor) -> Tensor:
    """A few targets that are not there."""
    return torch.where(torch.arange(ROWS) % 5 == 1, torch.nan, labels)


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    """Written without a thought of labels that do not count."""
    return functional.mse_loss(logits, functional.one_hot(labels, 3).float())


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(logits[:, 0], labels)


def present(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(logits[:, 0][~labels.isnan()], labels[~labels.isnan()])


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels, weight=WEIGHT)


CASES = {
    "classes": (ClassificationLoss(), CLASSES, functional.cross_entropy),
    "weighted classes": (ClassificationLoss(weight=WEIGHT), CLASSES, weighted),
    "numbers": (RegressionLoss(), FEATURES.sum(-1), squared),
    "numbers, some missing": (RegressionLoss(skip_nan=True), missing(FEATURES.sum(-1)), present),
    "a mean of classes": (MeanLoss(one_hot, lambda y: torch.tensor(y.numel())), CLASSES, one_hot),
    "a mean of numbers": (MeanLoss(squared, lambda y: torch.tensor(y.numel())), FEATURES.sum(-1), squared),
}


class Linear(nn.Module):
    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1 if labels.is_floating_point() else 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def rows(labels: Tensor, which: Sequence[int]) -> list[dict[str, Tensor]]:
    return [{"x": FEATURES[row], "labels": labels[row]} for row in which]


def train(
    env: DistributedEnvInterface, loss: TokenLoss, labels: Tensor, which: Sequence[int], **options: object
) -> list[float]:
    """Losses of the steps and, at the end, of all rows."""
    common = settings("unused", num_train_epochs=EPOCHS, max_steps=-1, lr_scheduler_type="constant")
    sizes = {"per_device_train_batch_size": SIZE, "per_device_eval_batch_size": SIZE}
    del common["learning_rate"]
    trainer = DDPTrainer(
        DDPTrainingArguments(**{**common, **sizes, "dataloader_shuffle": False, **options}),  # type: ignore[arg-type]
        model_init=lambda: Linear(labels),
        train_dataset=rows(labels, which),
        eval_dataset=rows(labels, which),
        compute_loss_func=loss,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.2}),
        distributed_env=env,
        callbacks=[],
    )
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]  # type: ignore[arg-type]
    return [*losses, trainer.evaluate()["eval_loss"]]


def plain(function: object, labels: Tensor, steps: Sequence[Sequence[int]]) -> list[float]:
    """The same by a loop of torch's, over the rows that all ranks have in a step."""
    torch.manual_seed(7)
    model, losses = Linear(labels), []
    for which in [*steps] * EPOCHS:
        value = function(model(FEATURES[which]), labels[which])  # type: ignore[operator]
        losses.append(value.item())
        model.zero_grad()
        value.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.2 * parameter.grad  # type: ignore[operator]
    return [*losses, function(model(FEATURES), labels).item()]  # type: ignore[operator]


def main() -> None:
    """Train with every loss: on data that rank 0 reads for all, and on shards of unequal length."""
    notes: dict[str, object] = {}
    with DistributedEnvironment(no_accelerator=True, training_timeout=60) as env:
        ranks, size = env.world_size, SIZE * env.world_size
        dispatched = [list(range(start, min(start + size, ROWS))) for start in range(0, ROWS, size)]
        shards = [range(ROWS - 4 * (ranks - 1))]  # the first is the longest
        shards += [
            range(shards[0].stop + 4 * rank, shards[0].stop + 4 * rank + 4) for rank in range(ranks - 1)
        ]
        longest = len(shards[0])
        own = [
            [row for shard in shards for row in shard[start : start + SIZE]]
            for start in range(0, longest, SIZE)
        ]
        for name, (loss, labels, function) in CASES.items():
            notes[f"{name}, dispatched"] = [
                train(env, loss, labels, range(ROWS)),
                plain(function, labels, dispatched),
            ]
            found = train(env, loss, labels, shards[env.rank], dispatch_batches=False)
            notes[f"{name}, own"] = [found, plain(function, labels, own)]
    write_notes(notes)


if __name__ == "__main__":
    main()
