"""A decoder in the manner of Llama, small enough to train in a second: plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from model_parallel import CausalAttention

VOCABULARY = 101
"""A prime, so that nothing that is cut into equal parts fits it."""
WIDTH, HEADS, BLOCKS, LONGEST = 32, 4, 4, 16


class Attention(nn.Module):
    """Causal attention with rotary positions; projections of the input have biases, as in Qwen 2."""

    rotation: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_size = width // HEADS
        self.qkv_proj = nn.Linear(width, 3 * width, bias=True)
        self.o_proj = nn.Linear(width, width, bias=False)
        half = self.head_size // 2
        angles = torch.outer(torch.arange(LONGEST), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), persistent=False)
        self.attend = CausalAttention()

    def forward(self, x: Tensor, position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        # Tensor parallelism leaves fewer heads to each rank.
        heads = self.qkv_proj(x).view(batch, length, 3, -1, self.head_size).permute(2, 0, 3, 1, 4)
        q, k = self._rotate(heads[0], position_ids), self._rotate(heads[1], position_ids)
        mixed = self.attend(q, k, heads[2], document_ids)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            cos, sin = self.rotation[:, : x.shape[-2]].to(x.dtype)
        else:
            cos, sin = self.rotation[:, position_ids].to(x.dtype).unsqueeze(2)
        one, other = x.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.mlp_norm, self.mlp = nn.RMSNorm(width), FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), position_ids, document_ids))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """The model: int64 tokens [batch, length] to logits [batch, length, vocabulary].

    Args:
        tied: Whether the head shares its weight with the embedding.
        dropout: Share of the activations that each half of a block drops.
        blocks: How many blocks.
        width: Size of the hidden states.
    """

    tp_plan: ClassVar[Mapping[str, str]] = {
        "embed": "embedding_rowwise",
        "layers.*.attention.qkv_proj": "packed_colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(
        self, *, tied: bool = False, dropout: float = 0.0, blocks: int = BLOCKS, width: int = WIDTH
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.05)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def flops_per_token(self, sequence_length: int) -> float:
        # Without it the operators would be counted at one length of the ragged rows after another.
        return 6.0 * sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, document_ids)
        return self.head(self.norm(x))


class Untold(Decoder):
    """The same, and its FLOPs have to be counted."""

    flops_per_token = None  # type: ignore[assignment]
