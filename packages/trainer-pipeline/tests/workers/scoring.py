"""Evaluation and the log, beside those of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import Batches, Tiny, alone, curve, once, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface

LAYERS = 8


def hits(predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that were the most probable ones, and tokens that count."""
    logits: Tensor = predictions  # type: ignore[assignment]
    counted = labels[:, 1:] != -100
    right = (logits[:, :-1].argmax(dim=-1) == labels[:, 1:]) & counted
    return right.sum(), counted.sum()


def rows(predictions: object, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of predictions, and of labels."""
    logits: Tensor = predictions  # type: ignore[assignment]
    return torch.tensor(len(logits)), torch.tensor(len(labels))


METRICS = {"hits": hits, "rows": rows}


class Short(Batches):
    """Ten rows in batches of four; the last two are filled up."""

    def __init__(self, rows: int = 10, length: int = 5) -> None:
        super().__init__(rows, length=length)


def scored(env: DistributedEnvInterface, folder: Path, **settings: object) -> object:
    """Train and evaluate in between and at the end, with rows of another length than in training."""
    make = partial(Tiny, LAYERS)
    given: dict[str, object] = {"eval_strategy": "steps", "eval_steps": 2, "check_flops": True}
    data = {"train": Batches(), "evaluate": Short(), "eval_metrics": METRICS}
    trainer = trainer_of(env, folder, make, **data, **given, **settings)  # type: ignore[arg-type]
    before = trainer.evaluate()
    trainer.train()
    named = trainer.evaluate({"whole": Short(), "short": Short(3)})
    after = [trainer.evaluate(), trainer.evaluate(Short(3))]
    replicas = int(str(settings.get("replicas", 1)))

    def of_one() -> dict[str, list[object]]:
        own = alone(env, folder, make, **data, **given, gradient_accumulation_steps=replicas)  # type: ignore[arg-type]
        expected: list[object] = [own.evaluate()]
        own.train()
        expected += [own.evaluate(), own.evaluate(Short(3))]
        return {"alone": expected, "curve": curve(own), "log alone": list(own.state.log_history)}

    own = once(env, f"scored, {replicas}", of_one)
    return {
        "scores": [before, *after],
        "named": named,
        "alone": own["alone"],
        "curves": [curve(trainer), own["curve"]],
        "log": trainer.state.log_history,
        "log alone": own["log alone"],
    }


class Ragged(Batches):
    """Batches of 4, 3, 1 and 2 rows of several lengths, with rows that count nothing."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        for number, size in enumerate((4, 3, 1, 2, 4, 3)):
            ids = self.ids[4 * number : 4 * number + size, : 6 - number % 3]
            labels = ids.clone()
            labels[: size // 2] = -100
            yield {"input_ids": ids, "labels": labels}


def uneven(env: DistributedEnvInterface, folder: Path, **settings: object) -> object:
    """Batches that the microbatches do not divide, of several lengths."""
    make = partial(Tiny, LAYERS)
    trainer = trainer_of(env, folder, make, train=Ragged(), max_steps=6, **settings)
    trainer.train()

    def of_one() -> list[object]:
        own = alone(env, folder, make, train=Ragged(), max_steps=6)
        own.train()
        return curve(own)

    return {"curves": [curve(trainer), once(env, "uneven", of_one)]}


def frozen_embedding(layers: int) -> nn.Module:
    """A model whose embedding is not trained."""
    model = Tiny(layers)
    model.embed.weight.requires_grad_(False)
    return model


def frozen_beginning(layers: int) -> nn.Module:
    """A model whose first stages, and a weight of the last block, are not trained."""
    model = frozen_embedding(layers)
    for block in model.layers[: layers // 2]:
        block.requires_grad_(False)
    model.layers[-1].down.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return model


def frozen_end(layers: int) -> nn.Module:
    """A model whose last stage is not trained."""
    model = Tiny(layers)
    for module in (*model.layers[layers // 2 :], model.norm, model.head):
        module.requires_grad_(False)
    return model


def partly(env: DistributedEnvInterface, folder: Path, make: object, **settings: object) -> object:
    """Train a model of which a part is frozen."""
    made = partial(make, LAYERS)  # type: ignore[call-overload]
    trainer = trainer_of(env, folder, made, train=Batches(), **settings)  # type: ignore[arg-type]
    trainer.train()

    def of_one() -> tuple[list[object], dict[str, Tensor]]:
        own = alone(env, folder, made, train=Batches())
        own.train()
        weights = own.unwrapped_model().named_parameters()
        return curve(own), {name: weight.detach() for name, weight in weights}

    expected, there = once(env, f"partly, {make}", of_one)
    here = dict(trainer.unwrapped_model().named_parameters())
    return {
        "curves": [curve(trainer), expected],
        "frozen": [name for name, value in here.items() if not value.requires_grad],
        "differing": [n for n, v in here.items() if not torch.allclose(v, there[n], rtol=1e-4, atol=1e-6)],
        "moved": [n for n, v in here.items() if not v.requires_grad and not torch.equal(v, there[n])],
    }


OF_BOTH: dict[str, Scenario] = {
    "scored, 1f1b": scored,
    "scored, zbv": partial(scored, schedule="zbv", n_microbatches=3),
    "uneven, 1f1b": uneven,
    "uneven, zbv": partial(uneven, schedule="zbv"),
}
FROZEN = {
    "1f1b": (frozen_embedding,),
    "gpipe": (frozen_embedding,),
    "interleaved_1f1b": (frozen_embedding, frozen_beginning, frozen_end),
    "zbv": (frozen_embedding, frozen_beginning, frozen_end),
}
OF_TWO: dict[str, Scenario] = {
    f"{make.__name__}, {schedule}": partial(partly, make=make, schedule=schedule)
    for schedule, makes in FROZEN.items()
    for make in makes
} | {"scored, interleaved_1f1b": partial(scored, schedule="interleaved_1f1b")}
OF_FOUR: dict[str, Scenario] = {"scored, replicas": partial(scored, replicas=2)}
