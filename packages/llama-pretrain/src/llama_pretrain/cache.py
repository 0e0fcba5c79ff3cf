"""Keys and values of positions already seen, for generation."""

from __future__ import annotations

from torch import Tensor

from .config import LlamaConfig


class KVCache:
    """Keys and values of every layer, in storage allocated once, when the first ones come.

    Args:
        config: Shape of the model.
        batch_size: Number of sequences.
        max_length: Number of positions there is room for.
    """

    def __init__(self, config: LlamaConfig, batch_size: int, max_length: int) -> None:
        self._shape = (
            config.num_hidden_layers,
            batch_size,
            config.num_key_value_heads,
            max_length,
            config.head_dim,
        )
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.max_length = max_length
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one layer and return those of all positions.

        Both are `[batch, kv_heads, new, head_dim]`; what comes back is longer along the third dimension.
        `length` stays as it is until every layer has stored its part: see `advance`.
        """
        if self._keys is None or self._values is None:
            # Only here it is known where and in what the model computes; sharding may decide that.
            self._keys, self._values = keys.new_empty(self._shape), values.new_empty(self._shape)
        end = self.length + keys.shape[2]
        self._keys[layer, :, :, self.length : end] = keys
        self._values[layer, :, :, self.length : end] = values
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def advance(self, count: int) -> None:
        """Count `count` positions as stored in every layer."""
        self.length += count
