"""A stage that raises, and a rank that dies, in the middle of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from ranks import Scenario
from refusals import IN_STEPS
from tiny import Batches, Block, Cache, Tiny, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface
from trainer_pipeline import PipelineTrainer

LAYERS = 8
MARKER = "failed"
"""The file that is written when something goes wrong."""
CALL = 7
"""The call of a block of the last rank that goes wrong: not the first microbatch of a step."""


class StageError(ValueError):
    """What a block raises."""


class Fused(Block):
    """A block that can be made to go wrong."""

    do: Callable[[], None] | None = None
    calls = 0

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """What the block makes of it."""
        if self.do is not None:
            self.calls += 1
            if self.calls == CALL:
                self.do()
        return super().forward(x, cache)


def fused() -> nn.Module:
    """A model of such blocks."""
    model = Tiny(LAYERS)
    model.layers = nn.ModuleList(Fused(place) for place in range(LAYERS))
    return model


def raise_it(marker: Path) -> None:
    """Raise."""
    marker.touch()
    raise StageError("the 7th call of this block is one too many")


def raise_runtime_error(marker: Path) -> None:
    """Raise what torch raises for shapes that do not fit: the type that broken collectives have as well."""
    marker.touch()
    torch.ones(2, 3) @ torch.ones(2, 3)


def die(marker: Path) -> None:
    """Die."""
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def train(trainer: PipelineTrainer) -> None:
    trainer.train()


def evaluate(trainer: PipelineTrainer) -> None:
    trainer.evaluate()


def generate(trainer: PipelineTrainer) -> None:
    trainer.pipeline_generate(torch.tensor([[1, 2, 3]]), max_new_tokens=10, do_sample=False)


def failing(
    env: DistributedEnvInterface,
    folder: Path,
    doing: Callable[[PipelineTrainer], None],
    do: Callable[[Path], None] = raise_it,
    **settings: object,
) -> object:
    """Let the block before the last one go wrong; notes the moment on the file system."""
    marker = folder.parent / MARKER
    trainer = trainer_of(env, folder, fused, train=Batches(), evaluate=Batches(), **settings)  # type: ignore[arg-type]
    block = trainer.unwrapped_model().layers[LAYERS - 2]  # type: ignore[index, union-attr]
    if next(block.parameters(), None) is not None:
        block.do = partial(do, marker)
    doing(trainer)
    return {}


DOING = {"training": train, "evaluating": evaluate, "generating": generate}
WORLDS: dict[str, tuple[int, dict[str, Scenario]]] = {
    **{
        f"{ranks}, {name}": (ranks, {"failing": partial(failing, doing=doing)})
        for ranks in (2, 4)
        for name, doing in DOING.items()
    },
    "2, shapes": (2, {"failing": partial(failing, doing=train, do=raise_runtime_error)}),
    **{f"2, {name}": (2, {"failing": scenario}) for name, scenario in IN_STEPS.items()},
    "2, zbv": (2, {"failing": partial(failing, doing=train, schedule="zbv")}),
    "4, killed": (4, {"failing": partial(failing, doing=train, do=die, schedule="interleaved_1f1b")}),
}
