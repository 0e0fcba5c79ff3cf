"""Ragged rows in an order that a seed fixes, as microbatches of any size over the same global batches.

An epoch has 27 pairs of rows. A global batch is four pairs, so the last one of an epoch is short, however
its rows are divided. One pair counts no token at all, and single rows here and there do not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from .model import LONGEST, VOCABULARY

IGNORED = -100
GLOBAL_BATCH = 8
"""Rows of an optimizer step, in most recipes."""
PAIRS = 27
ROWS = 2 * PAIRS
STEPS_PER_EPOCH = 7
Row = tuple[list[int], list[int]]
"""Tokens and labels, of one length; labels are not shifted."""


@cache
def rows(seed: int) -> list[Row]:
    """All rows, two of a pair next to each other."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    made: list[Row] = []
    for number in range(ROWS):
        tokens = [draw(0, VOCABULARY)]
        for _ in range(draw(2, LONGEST)):
            # Mostly a rule that can be learned, sometimes chance.
            tokens.append((5 * tokens[-1] + 1) % VOCABULARY if draw(0, 4) else draw(0, VOCABULARY))
        prompt = draw(0, 4)
        labels = [IGNORED] * prompt + tokens[prompt:]
        if number in (10, 11, 30):  # a pair, and a row beside one that counts
            labels = [IGNORED] * len(tokens)
        if number == 41:
            tokens, labels = tokens[:1], tokens[:1]  # nothing follows the only token
        made.append((tokens, labels))
    return made


class RaggedLoader:
    """Batches of one seed's rows, padded to the longest row in them; another order of pairs in each epoch.

    Args:
        batch_size: Rows of a batch: a divisor of the global batch.
        seed: Which rows.
        multiple: What the length of each batch is a multiple of, with tokens that do not count.
    """

    def __init__(self, batch_size: int, seed: int = 0, multiple: int = 1) -> None:
        self.batch_size = batch_size
        self.seed = seed
        self.multiple = multiple
        self.epoch = 0
        self.served = 0

    def __len__(self) -> int:
        return -(-ROWS // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        table = rows(self.seed)
        pairs = torch.randperm(PAIRS, generator=torch.Generator().manual_seed(1000 + self.epoch)).tolist()
        order = [table[2 * pair + half] for pair in pairs for half in (0, 1)]
        while self.served < len(self):
            start = self.served * self.batch_size
            self.served += 1
            yield padded(order[start : start + self.batch_size], self.multiple)
        self.epoch, self.served = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.served = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.served = state["epoch"], state["served"]


class Shard:
    """Every `world_size`-th batch of a loader, from the one at `rank` on: for a rank that reads by itself.

    The ranks' next n batches are then the loader's next n times `world_size`.
    """

    def __init__(self, loader: RaggedLoader, rank: int, world_size: int) -> None:
        self.loader = loader
        self.rank = rank
        self.world_size = world_size
        self.batch_size = loader.batch_size

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def __len__(self) -> int:
        return len(range(self.rank, len(self.loader), self.world_size))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(self.loader, start=self.loader.served):
            if number % self.world_size == self.rank:
                yield batch

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loader.load_state_dict(state)


def padded(batch: list[Row], multiple: int = 1) -> dict[str, Tensor]:
    """int64 [rows, longest] of tokens and of labels."""
    longest = -(-max(len(tokens) for tokens, _ in batch) // multiple) * multiple
    return {
        "input_ids": torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in batch]),
        "labels": torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in batch]),
    }
