"""The work of the data-parallel benchmark: that of the step benchmark, shared among ranks.

A step's global batch is the next `world_size * accumulation` batches of the examples, whichever rank works on
which of them. All batches have the same number of tokens, so a mean over ranks and microbatches of their mean
losses is the mean over the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from _step_work import Clock, Example, Size, Work
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from dist_env import DistributedEnvInterface


@dataclass
class StepClock(Clock):
    """A clock whose step has several forward passes."""

    accumulation: int = 1
    calls: int = 0

    def tick(self) -> None:
        """Count a forward pass, and the step if it is the first one of it."""
        if self.calls % self.accumulation == 0:
            super().tick()
        self.calls += 1


@dataclass(frozen=True)
class RankWork(Work):
    """What one run trains, as one rank sees it.

    Attributes:
        examples: Those of all ranks.
        batches: Those of all ranks, in order.
        env: This rank.
        accumulation: Microbatches of a step on each rank.
    """

    env: DistributedEnvInterface
    accumulation: int

    @classmethod
    def of_ranks(
        cls, size: Size, windows: int, directory: Path, *, env: DistributedEnvInterface, accumulation: int
    ) -> RankWork:
        """The work of a warm-up and so many windows."""
        rows = size.batch_size * env.world_size * accumulation
        whole = Work.of(replace(size, batch_size=rows), windows, directory)
        firsts = range(0, len(whole.examples), size.batch_size)
        batches = [default_collate(whole.examples[at : at + size.batch_size]) for at in firsts]
        return cls(size, whole.steps, whole.examples, batches, directory, env, accumulation)

    def model(self) -> nn.Module:
        """A new model with the same weights each time."""
        model = super().model()
        # Attributes of a module are typed as modules and tensors.
        cast(Any, model).clock = StepClock(accumulation=self.accumulation)
        return model

    def rank_batches(self) -> list[Example]:
        """This rank's batches, made beforehand."""
        return self.batches[self.env.rank :: self.env.world_size]

    def rank_examples(self) -> list[Example]:
        """The examples of this rank's batches."""
        size, world = self.size.batch_size, self.env.world_size
        firsts = range(self.env.rank * size, len(self.examples), size * world)
        return [example for at in firsts for example in self.examples[at : at + size]]

    def rank_loader(self) -> Any:
        """A new torch loader of this rank's share, by torch's sampler."""
        examples = cast("Dataset[Example]", self.examples)
        sampler: DistributedSampler[Example] = DistributedSampler(
            examples, self.env.world_size, self.env.rank, shuffle=False
        )
        return DataLoader(examples, batch_size=self.size.batch_size, sampler=sampler)
