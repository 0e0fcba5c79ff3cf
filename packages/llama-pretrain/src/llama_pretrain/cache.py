"""Keys and values of positions already seen, for generation."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LlamaConfig


class KVCache:
    """Keys and values of every layer, in storage allocated once.

    Args:
        config: Shape of the model.
        batch_size: Number of sequences.
        max_length: Number of positions there is room for.
        device: Where the model is.
        dtype: Dtype of the keys and values.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch_size: int,
        max_length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (
            config.num_hidden_layers,
            batch_size,
            config.num_key_value_heads,
            max_length,
            config.head_dim,
        )
        self._keys = torch.empty(shape, device=device, dtype=dtype)
        self._values = torch.empty(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one layer and return those of all positions.

        Both are `[batch, kv_heads, new, head_dim]`; what comes back is longer along the third dimension.
        `length` stays as it is until every layer has stored its part: see `advance`.
        """
        end = self.length + keys.shape[2]
        self._keys[layer, :, :, self.length : end] = keys
        self._values[layer, :, :, self.length : end] = values
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def advance(self, count: int) -> None:
        """Count `count` positions as stored in every layer."""
        self.length += count
