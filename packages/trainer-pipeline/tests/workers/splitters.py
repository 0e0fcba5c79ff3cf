"""Models whose blocks are not a list, with splitters of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from tiny import LONGEST, VOCABULARY, WIDTH, Batches, Block, Tiny, alone, curve, once, trainer_of
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

from dist_env import DistributedEnvInterface, StaticDistributedEnvironment
from trainer_core import Trainer, TrainingArguments


class Named(nn.Module):
    """Four blocks that are attributes; the head may be tied, and one norm is used at two places."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.3 * torch.randn(LONGEST, WIDTH))
        self.first, self.second = Block(0), Block(1)
        self.between = nn.LayerNorm(WIDTH)
        self.third, self.fourth = Block(2), Block(3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        x = self.between(self.second(self.first(x)))
        return self.head(self.between(self.fourth(self.third(x))))


class Begin(nn.Module):
    """Embedding and a block."""

    def __init__(self, model: Named) -> None:
        super().__init__()
        self.embed, self.places, self.block = model.embed, model.places, model.first

    def forward(self, hidden: Tensor | None, input_ids: Tensor) -> Tensor:
        """The hidden state behind the first block."""
        return self.block(self.embed(input_ids) + self.places[: input_ids.shape[1]])


class Middle(nn.Module):
    """A block, and perhaps a norm."""

    def __init__(self, block: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.norm = block, norm

    def forward(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """The hidden state behind it."""
        hidden = self.block(hidden)
        return hidden if self.norm is None else self.norm(hidden)


class End(nn.Module):
    """The last block and the head."""

    def __init__(self, model: Named) -> None:
        super().__init__()
        self.block, self.norm, self.head = model.fourth, model.between, model.head

    def forward(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.norm(self.block(hidden)))


class Chain(nn.Module):
    """Several of them one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, hidden: Tensor | None, input_ids: Tensor) -> Tensor:
        """What the last one makes of it."""
        for part in self.parts:
            hidden = part(hidden, input_ids)
        return hidden  # type: ignore[return-value]


def split(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
    """Two stages, or four."""
    assert isinstance(model, Named)
    parts = [Begin(model), Middle(model.second, model.between), Middle(model.third), End(model)]
    size = len(parts) // num_stages
    return [Chain(parts[start : start + size]) for start in range(0, len(parts), size)]


class Hiding(nn.Module):
    """A stage whose parameters cannot be seen."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.held = (stage,)

    def forward(self, hidden: Tensor | None, input_ids: Tensor) -> Tensor:
        """What the stage computes."""
        return self.held[0](hidden, input_ids)


def split_and_hide(model: nn.Module, num_stages: int) -> Sequence[nn.Module]:
    """Stages of which the last one shows no parameters."""
    *others, last = split(model, num_stages)
    return [*others, Hiding(last)]


def leaving_out(env: DistributedEnvInterface, folder: Path) -> object:
    """A splitter that leaves parameters out."""
    trainer_of(env, folder, Named, splitter=split_and_hide).unwrapped_model()
    return {}


def trained(env: DistributedEnvInterface, folder: Path, *, tied: bool = False, **settings: object) -> object:
    """The curve, and what is exported, beside one process."""
    make = partial(Named, tied=tied)
    data: Mapping[str, object] = {"train": Batches(), "evaluate": Batches(10)}
    trainer = trainer_of(env, folder, make, splitter=split, **data, **settings)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model(str(folder / "exported"))

    def of_one() -> tuple[list[object], float]:
        own = alone(env, folder, make, **data)  # type: ignore[arg-type]
        own.train()
        return curve(own), own.evaluate()["eval_loss"]

    def of_the_export() -> float:
        loaded = Trainer(
            TrainingArguments(output_dir=str(folder / "loaded"), use_cpu=True),
            model_init=make,
            initial_weights=folder / "exported",
            eval_dataset=Batches(10),
            distributed_env=StaticDistributedEnvironment(),
            callbacks=[],
        )
        return loaded.evaluate()["eval_loss"]

    expected, score = once(env, f"split, {tied}", of_one)
    exported = once(env, f"exported, {folder}", of_the_export)
    return {
        "curves": [curve(trainer), expected],
        "eval": [trainer.evaluate()["eval_loss"], exported, score],
        "held": [name for name, _ in trainer.unwrapped_model().named_parameters()],
    }


def generating(env: DistributedEnvInterface, folder: Path) -> object:
    """Texts, which need the stages of BlockSplitter."""
    trainer = trainer_of(env, folder, Named, splitter=split)
    trainer.pipeline_generate(torch.tensor([[1, 2]]), max_new_tokens=1)
    return {}


def by_factory(env: DistributedEnvInterface, folder: Path, factory: object, **settings: object) -> object:
    """A schedule class instead of a name."""
    trainer = trainer_of(env, folder, train=Batches(), factory=factory, **settings)  # type: ignore[arg-type]
    trainer.train()

    def of_one() -> list[object]:
        own = alone(env, folder, train=Batches())
        own.train()
        return curve(own)

    return {"curves": [curve(trainer), once(env, "factory", of_one)]}


class Late(Tiny):
    """What is used after the blocks is registered before them."""

    def __init__(self) -> None:
        super().__init__()
        layers = self.layers
        del self.layers
        self.layers = layers


def in_another_order(env: DistributedEnvInterface, folder: Path) -> object:
    """The order of calls decides, and not that of registration."""
    trainer = trainer_of(env, folder, Late, train=Batches())
    trainer.train()

    def of_one() -> list[object]:
        own = alone(env, folder, Late, train=Batches())
        own.train()
        return curve(own)

    names = [name for name, _ in trainer.unwrapped_model().named_parameters()]
    return {"curves": [curve(trainer), once(env, "another order", of_one)], "norm": "norm.weight" in names}


class Mine(ScheduleGPipe):
    """A subclass."""


SCENARIOS: dict[str, Scenario] = {
    "split, 1f1b": trained,
    "split, tied": partial(trained, tied=True),
    "split, interleaved_1f1b": partial(trained, schedule="interleaved_1f1b", tied=True),
    "split, zbv": partial(trained, schedule="zbv", tied=True),
    "split, generating": generating,
    "split, leaving out": leaving_out,
    "another order": in_another_order,
    "factory, class": partial(by_factory, factory=ScheduleInterleaved1F1B),
    "factory, subclass": partial(by_factory, factory=Mine),
    "factory, partial": partial(by_factory, factory=partial(Mine)),
}
