"""Models and batches of many kinds, which a stage has to treat as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import VOCABULARY, WIDTH, Batches, Block, Tiny, alone, curve, once, trainer_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dist_env import DistributedEnvInterface
from trainer_core import CausalLMLoss, MeanLoss, OutputMeanLoss, Trainer


class Pairs(nn.Module):
    """A block that returns two things."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state, and something else."""
        found = self.block(x)
        return found, found.mean()


class Tupled(Tiny):
    """Takes the hidden state out of what its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pairs() for _ in range(6))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(self.norm(x))


class Twisted(Tiny):
    """Its hidden state does not lie in memory row by row."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embed(input_ids).transpose(0, 1)
        for layer in self.layers:
            x = layer(x.transpose(0, 1)).transpose(0, 1)
        return self.head(self.norm(x.transpose(0, 1)))


class Wide(nn.Module):
    """Sequences to classes; the embedding has a parameter of the model itself added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.3 * torch.randn(64, WIDTH))
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, 5]."""
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


class Rows:
    """Classes of rows, whose length differs between batches though their labels do not."""

    batch_size = 4

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(3)
        for number in range(6):
            ids = torch.randint(0, VOCABULARY, (4, 4 + number % 3), generator=generator)
            yield {"input_ids": ids, "labels": ids.sum(dim=1) % 5}


class Counting(Tiny):
    """Counts its calls before and after the blocks, in buffers that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Counter(), Counter()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.before(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.after(self.norm(x)))


class Counter(nn.Module):
    """Counts calls, and has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input times the weight."""
        if self.training:
            self.calls += 1
        return x * self.weight


class Output(dict[str, Tensor]):
    """What a model returns that computes its loss."""


class OwnLoss(Tiny):
    """Returns logits under a name."""

    def forward(self, input_ids: Tensor) -> Output:
        """Logits."""
        return Output(logits=super().forward(input_ids))


def both(
    env: DistributedEnvInterface,
    folder: Path,
    make: Callable[[], nn.Module],
    *,
    train: Callable[[], object] = Batches,
    options: Mapping[str, object] | None = None,
    **settings: object,
) -> object:
    """The curve beside one process; settings are those of the pipeline."""

    def trained(trainer: Trainer) -> list[object]:
        trainer.train()
        return curve(trainer)

    here = trained(trainer_of(env, folder, make, train=train(), options=options, **settings))  # type: ignore[arg-type]
    there = once(
        env,
        f"kind, {make}, {options}",
        lambda: trained(alone(env, folder, make, train=train(), options=options)),
    )
    return {"curves": [here, there]}


def grouped(env: DistributedEnvInterface, folder: Path) -> object:
    """Options for parameters that only one rank has."""
    groups = {"embed*": {"lr": 0.0}, "head*": {"weight_decay": 0.5}}
    trainer = trainer_of(env, folder, Tiny, train=Batches(), options={"optimizer_groups": groups})
    trainer.train()
    assert trainer.optimizer is not None
    return {"rates": sorted({float(group["initial_lr"]) for group in trainer.optimizer.param_groups})}


def counted(env: DistributedEnvInterface, folder: Path) -> object:
    """What is saved of buffers that every rank changes."""
    from checkpoint_core import load_model_weights

    trainer = trainer_of(env, folder, Counting, train=Batches())
    trainer.train()
    trainer.save_model(str(folder / "exported"))
    loaded = Counting()
    load_model_weights(loaded, folder / "exported")
    return {"before": float(loaded.before.calls), "after": float(loaded.after.calls)}


def scored(env: DistributedEnvInterface, folder: Path) -> object:
    """A metric of what a model returns beside a tensor, on rows that do not fill the last batch."""

    def right(predictions: Mapping[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
        found = predictions["logits"][:, :-1].argmax(dim=-1)
        counts = labels[:, 1:] != -100
        return ((found == labels[:, 1:]) & counts).sum(), counts.sum()

    def mean(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)

    loss = OutputMeanLoss(mean, lambda labels: (labels[:, 1:] != -100).sum())  # type: ignore[arg-type]
    found = []
    for make in (trainer_of, alone):
        options = {"compute_loss_func": loss, "eval_metrics": {"right": right}}
        trainer = make(env, folder, OwnLoss, evaluate=Batches(10), options=options)  # type: ignore[operator]
        metrics = trainer.evaluate()
        found.append([metrics["eval_loss"], metrics["eval_right"]])
    return {"metrics": found}


def of_classes() -> MeanLoss:
    """Cross-entropy of rows."""
    return MeanLoss(functional.cross_entropy, lambda labels: torch.tensor(labels.numel()))


class CalledAgain(CausalLMLoss):
    """Runs the model behind its `predict`, too: where the loss is computed, and in the backward pass."""

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """The logits, computed again in the backward pass, and how to compute them once more."""
        logits = checkpoint(lambda: model(**inputs), use_reentrant=False)
        return logits, partial(model, **inputs)

    def __call__(self, predictions: tuple[Tensor, Callable[[], Tensor]], labels: Tensor) -> Tensor:
        """The mean of two losses."""
        logits, again = predictions
        return (super().__call__(logits, labels) + super().__call__(again(), labels)) / 2


SCENARIOS: dict[str, Scenario] = {
    "kind, tuples": partial(both, make=Tupled),
    "kind, tuples, zbv": partial(both, make=Tupled, schedule="zbv"),
    "kind, twisted": partial(both, make=Twisted),
    "kind, classes": partial(both, make=Wide, train=Rows, options={"compute_loss_func": of_classes()}),
    "kind, called again": partial(both, make=Tiny, options={"compute_loss_func": CalledAgain()}),
    "kind, grouped": grouped,
    "kind, counted": counted,
    "kind, scored": scored,
}
