"""What a plan of memory feeds a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError


@dataclass(frozen=True)
class PlannedBatch:
    """Rows of token ids and labels of one length; or a batch that is given, of which only shapes count.

    Attributes:
        sequence_length: Tokens of a row.
        batch: What a model gets at a time, instead; with `labels`.

    Raises:
        ConfigurationError: If neither or both are given, a row is too short to predict anything, or the
            batch has no labels.
    """

    sequence_length: int | None = None
    batch: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if (self.sequence_length is None) == (self.batch is None):
            raise ConfigurationError(
                "sequence_length",
                self.sequence_length,
                "is needed to know the activations, unless a batch is given",
                "give one of sequence_length and batch",
            )
        if self.sequence_length is not None and self.sequence_length < 2:
            raise ConfigurationError(
                "sequence_length", self.sequence_length, "must be at least 2", "raise it"
            )
        if self.batch is not None and not isinstance(self.batch.get("labels"), Tensor):
            raise ConfigurationError(
                "batch", sorted(self.batch), "has no tensor 'labels'", "give it, of any values"
            )

    def of(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Zeros of the shapes and dtypes of a batch.

        Args:
            rows: How many, where no batch is given.
            device: Where they are made; on meta they take no memory.
        """
        if self.batch is not None:
            return {
                name: torch.zeros(value.shape, dtype=value.dtype, device=device)
                for name, value in self.batch.items()
            }
        ids = torch.zeros((rows, self.sequence_length or 0), dtype=torch.int64, device=device)
        return {"input_ids": ids, "labels": ids.clone()}
