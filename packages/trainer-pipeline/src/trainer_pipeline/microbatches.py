"""Cut a batch into microbatches of one shape, put together what comes out, and know what is sent between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trainer_core import Batch, DataError, TokenLoss, TrainingArguments, ignored_like, labels_of

Shapes = tuple[tuple[int, ...], ...]


class Microbatch(NamedTuple):
    """What every stage is given at once."""

    inputs: Mapping[str, object]
    """Keyword arguments of the model."""
    labels: Tensor
    """[rows, ...]."""


def cut(batch: Batch, count: int) -> list[Microbatch]:
    """Cut a batch into microbatches.

    A batch that the count does not divide is filled up with copies of its last row that do not count.

    Args:
        batch: Tensors whose first dimension are its rows, as that of `labels` is, are cut; other values go
            to every microbatch.
        count: How many.

    Returns:
        Microbatches with equally many rows.

    Raises:
        DataError: If the labels have no rows, or are filled up and cannot say that they do not count.
    """
    labels = labels_of(batch)
    if not labels.ndim:
        raise DataError(
            "the labels of a batch are a single number, but a pipeline cuts batches along their rows. Give "
            "labels of shape [rows, ...]."
        )
    rows = labels.shape[0]
    missing = -rows % count
    cuts: dict[str, tuple[Tensor, ...]] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
            cuts[name] = _filled(value, missing, is_labels=name == "labels").chunk(count)
    whole = {name: value for name, value in batch.items() if name not in cuts}
    pieces = [{**whole, **{name: cuts[name][place] for name in cuts}} for place in range(count)]
    return [Microbatch(piece, _labels_out_of(piece)) for piece in pieces]


def join(predictions: Sequence[object], rows: int) -> object:
    """The predictions of all microbatches, without the rows that were filled up."""
    first = predictions[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([part for part in predictions if isinstance(part, Tensor)])[:rows]
    if not isinstance(first, Mapping):
        return list(predictions)
    parts = [part for part in predictions if isinstance(part, Mapping)]
    joined = {
        name: torch.cat([part[name] for part in parts])[:rows]
        for name, value in first.items()
        if isinstance(value, Tensor) and value.ndim
    }
    make: Callable[..., object] = type(first)  # such as an output class of Hugging Face
    return make(**joined)


def _filled(value: Tensor, missing: int, *, is_labels: bool) -> Tensor:
    # Refused also where nothing is missing: another batch of the run may not come out even.
    if is_labels and not value.dtype.is_signed:
        raise DataError(
            f"labels of {value.dtype} cannot hold -100 for rows that only fill up a batch. Convert them by "
            "labels.long() or labels.float() in the dataset or the data_collator."
        )
    if not missing:
        return value
    rows = value[-1:].expand(missing, *value.shape[1:])
    return torch.cat([value, ignored_like(rows) if is_labels else rows])


def _labels_out_of(piece: dict[str, object]) -> Tensor:
    labels = piece.pop("labels")
    if not isinstance(labels, Tensor):
        raise TypeError("labels are a tensor: that was checked before.")
    return labels


@dataclass
class MicrobatchQueue:
    """What the stages of a rank work on in a schedule."""

    args: TrainingArguments
    loss: TokenLoss
    microbatches: Sequence[Microbatch] = ()
    place: int = 0
    """Which of them is computed next."""
    divisor: Tensor | float = 1.0
    """What the losses are divided by before the backward pass."""
    losses: list[Tensor] = field(default_factory=list)
    """Sums of the token losses of the microbatches, where the last stage is."""

    def fill(
        self, loss: TokenLoss, microbatches: Sequence[Microbatch], divisor: Tensor | float = 1.0
    ) -> None:
        """Put in what is to be worked on."""
        self.loss, self.microbatches, self.divisor = loss, microbatches, divisor

    @property
    def current(self) -> Microbatch:
        """What is computed next."""
        return self.microbatches[self.place]

    def clear(self) -> None:
        """Let go of it."""
        self.microbatches = ()
        self.losses.clear()


class ActivationSpec(NamedTuple):
    """A hidden state without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ActivationSpecs:
    """The hidden state behind each stage but the last one, learnt once for microbatches that are alike."""

    def __init__(self) -> None:
        self._known: dict[Shapes, tuple[ActivationSpec, ...]] = {}

    def of(self, microbatch: Microbatch) -> tuple[ActivationSpec, ...] | None:
        """What they look like for a microbatch; None if that is not known.

        Where two unlike microbatches had hidden states of the shape of their labels and the same features
        behind it, those of all others have that too.
        """
        key = shapes_of(microbatch)
        if key in self._known:
            return self._known[key]
        rest = {tuple(_features(labels, hidden) for hidden in found) for (labels, *_), found in self._items()}
        shapes = {labels for (labels, *_), _ in self._items()}
        if len(rest) != 1 or len(shapes) < 2:
            return None
        (features,) = rest
        if any(each is None for each in features):
            return None
        return tuple(
            ActivationSpec((*key[0], *each.shape), each.dtype) for each in features if each is not None
        )

    def learn(
        self, microbatch: Microbatch, found: Mapping[int, ActivationSpec]
    ) -> tuple[ActivationSpec, ...]:
        """Take in what was seen behind each stage."""
        hidden = tuple(found[stage] for stage in sorted(found))
        self._known[shapes_of(microbatch)] = hidden
        return hidden

    def _items(self) -> Sequence[tuple[Shapes, tuple[ActivationSpec, ...]]]:
        return list(self._known.items())


def shapes_of(microbatch: Microbatch) -> Shapes:
    """The shapes of all tensors of a microbatch, those of the labels first."""
    tensors = [value for value in microbatch.inputs.values() if isinstance(value, Tensor)]
    return (tuple(microbatch.labels.shape), *(tuple(tensor.shape) for tensor in tensors))


def _features(labels: tuple[int, ...], hidden: ActivationSpec) -> ActivationSpec | None:
    """What a hidden state has behind rows and positions; None if it does not begin with these."""
    if len(labels) < 2 or hidden.shape[: len(labels)] != labels:
        return None
    return ActivationSpec(hidden.shape[len(labels) :], hidden.dtype)
