"""A small transformer: odd vocabulary, tied head, a parameter of one row, and one that is frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 23, 16, 2


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.mixing = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width + 1)
        self.down = nn.Linear(4 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, positions, width] to the same shape."""
        heads = self.mixing(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), dropout_p=self.dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    """Embedding, blocks and a head tied to the embedding."""

    def __init__(
        self, *, layers: int = 3, width: int = WIDTH, frozen: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.zeros(width))
        self.norm.weight.requires_grad_(not frozen)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]."""
        x = self.embed(input_ids) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def get_output_embeddings(self) -> nn.Linear:
        """The layer that makes the logits."""
        return self.head
