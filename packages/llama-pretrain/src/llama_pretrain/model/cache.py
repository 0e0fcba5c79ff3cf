"""Keys and values of positions already seen, for generation."""

from __future__ import annotations

from torch import Tensor

from .config import LlamaConfig


class KVCache:
    """Keys and values of the layers that compute, each in storage allocated once, when its first ones come.

    Layers that other ranks compute take no memory.

    Args:
        config: Shape of the model.
        batch_size: Number of sequences.
        max_length: Number of positions there is room for.
    """

    def __init__(self, config: LlamaConfig, batch_size: int, max_length: int) -> None:
        self._shape = (batch_size, config.num_key_value_heads, max_length, config.head_dim)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.max_length = max_length
        self.length = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of one layer and return those of all positions.

        Both are `[batch, kv_heads, new, head_dim]`; what comes back is longer along the third dimension.
        `length` stays as it is until every layer has stored its part: see `advance`.
        """
        if layer not in self._layers:
            # Only here it is known where and in what the layer computes; sharding may decide that.
            self._layers[layer] = keys.new_empty(self._shape), values.new_empty(self._shape)
        all_keys, all_values = self._layers[layer]
        end = self.length + keys.shape[2]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    def advance(self, count: int) -> None:
        """Count `count` positions as stored in every layer."""
        self.length += count
