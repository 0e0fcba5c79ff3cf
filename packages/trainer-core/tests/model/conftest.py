"""A small decoder with tied weights, dropout and a table that no checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_core import TrainingArguments

VOCABULARY, WIDTH, HEADS = 31, 16, 2


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, position: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x + position)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.linspace(0, 1, 64).unsqueeze(-1), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, position=self.position[: ids.shape[1]])
        return self.head(x)


@pytest.fixture
def decoder() -> type[Decoder]:
    return Decoder


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def arguments() -> Callable[..., TrainingArguments]:
    """Makes the arguments of a run."""
    return lambda **settings: TrainingArguments(**settings)


@pytest.fixture
def backward(ids: Tensor) -> Callable[[nn.Module], tuple[Tensor, dict[str, Tensor]]]:
    """Runs a model forward and backward under one seed; returns loss and gradients by name."""

    def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(11)
        model.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        torch.autograd.backward(loss)
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    return run


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forgets what other tests have compiled; blocks of all models here share their code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
