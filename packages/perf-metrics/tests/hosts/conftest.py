"""A tiny model, rows with padding, and a clock that the test moves, for real trainers of other projects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, KEPT = 97, 16, 12
"""Every second row has padding, in its last positions."""

Row = dict[str, Tensor]


class Clock:
    """Seconds that pass only where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rows(Dataset[Row]):
    """Token rows; each one that is fetched takes time on the clock."""

    def __init__(self, count: int, clock: Clock | None = None, seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(count)
        self._ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        self._clock, self._seconds = clock, seconds

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Row:
        if self._clock is not None:
            self._clock.now += self._seconds
        ids = self._ids[index]
        mask = torch.ones_like(ids)
        if index % 2:
            mask[KEPT:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rows() -> Callable[..., Rows]:
    return Rows
