"""A tiny Llama, a task it can learn, and helpers to train it and to let it speak."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_core import TrainingArguments
from trainer_core.precision import autocast

VOCABULARY = 32
WIDTH = 64
MakeSettings = Callable[..., TrainingArguments]


class Block(nn.Module):
    """Causal attention and a gated feed-forward, each added to the stream."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        # 40 is a multiple neither of 16 nor of 32.
        inner = 40 if odd else 128
        self.gate_proj = nn.Linear(WIDTH, inner, bias=False)
        self.up_proj = nn.Linear(WIDTH, inner, bias=False)
        self.down_proj = nn.Linear(inner, WIDTH, bias=False)
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.mlp_norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        heads = (*x.shape[:2], 4, WIDTH // 4)
        q, k, v = (p(normed).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o_proj(mixed.reshape(x.shape))
        normed = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class TinyLlama(nn.Module):
    """Two blocks, the second with sizes that fit no recipe; one weight directly in the model."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList([Block(odd=False), Block(odd=True)])
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.start
        x = x * torch.linspace(0.5, 1.5, input_ids.shape[1]).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def batch() -> Tensor:
    """Counting: each row continues by a step of its own."""
    start = torch.arange(8).unsqueeze(-1) * 3
    step = torch.arange(8).unsqueeze(-1) % 3 + 1
    return (start + step * torch.arange(16)) % VOCABULARY


def train(model: nn.Module, args: TrainingArguments, steps: int = 40) -> list[float]:
    """Train on one batch; the loss of every step."""
    ids = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        with autocast(args, "cpu"):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def generate(model: nn.Module, length: int = 12) -> Tensor:
    """The likeliest continuation of the first four tokens of each row."""
    ids = batch()[:, :4]
    for _ in range(length):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


class Lab:
    """What the tests of this folder share."""

    train = staticmethod(train)
    generate = staticmethod(generate)
    batch = staticmethod(batch)
    cpu = torch.device("cpu")

    @staticmethod
    def model(tied: bool = False, seed: int = 0) -> TinyLlama:
        torch.manual_seed(seed)
        return TinyLlama(tied)

    @staticmethod
    def settings(**given: object) -> TrainingArguments:
        return TrainingArguments(output_dir="unused", **given)  # type: ignore[arg-type]


@pytest.fixture
def lab() -> type[Lab]:
    return Lab
