"""Loss over an evaluation set: a sum over its tokens divided by their number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, cast

import torch

from .arguments import TrainingArguments
from .batch import Batch, labels_of
from .errors import DataError
from .loss import TokenLoss
from .parallelism import Parallelism


class EvaluationResult(NamedTuple):
    """What an evaluation measured, over all data-parallel ranks."""

    loss: float
    tokens: int


def evaluate(
    parallel: Parallelism,
    loader: object,
    loss: TokenLoss,
    args: TrainingArguments,
    *,
    on_batch: Callable[[], object],
) -> EvaluationResult:
    """Score a loader's batches without touching the training state or its random generators.

    Args:
        parallel: Holds the model.
        loader: Batches from the beginning of the evaluation set.
        loss: Sum-and-count loss.
        args: `max_eval_steps` and precision.
        on_batch: Called after every batch.

    Raises:
        DataError: If no token counts.
    """
    limit = args.max_eval_steps if args.max_eval_steps > 0 else None
    sums = torch.zeros(3, dtype=torch.float64, device=parallel.device)
    with _undisturbed(parallel):
        for batch in islice(cast(Iterable[Batch], loader), limit):
            sums[0] += parallel.forward(batch, loss, args)
            sums[1] += loss.count(labels_of(batch))
            sums[2] += 1
            on_batch()
    total, tokens, batches = parallel.sum(sums).tolist()
    if tokens == 0:
        raise DataError(
            f"the evaluation set gave {int(batches)} batches and no token that counts "
            f"(per_device_eval_batch_size={args.per_device_eval_batch_size}, "
            f"max_eval_steps={args.max_eval_steps}); give more evaluation data"
        )
    return EvaluationResult(loss=total / tokens, tokens=int(tokens))


class EvaluationData:
    """Gives the evaluation set from its beginning, as often as asked.

    Args:
        make: Builds the loader; called for each evaluation of a dataset, once for a ready-made loader.
        rewindable: Whether the loader keeps a position that must be set back.
    """

    def __init__(self, make: Callable[[], object], *, rewindable: bool) -> None:
        self._make = make
        self._loader = make() if rewindable else None
        self._beginning = self._position()

    def fresh(self) -> object:
        """A loader at the beginning of the set."""
        if self._loader is None:
            return self._make()
        if self._beginning is not None:
            self._loader.load_state_dict(copy.deepcopy(self._beginning))  # type: ignore[attr-defined]
        return self._loader

    def _position(self) -> object | None:
        if self._loader is None or not hasattr(self._loader, "load_state_dict"):
            return None
        position: object = self._loader.state_dict()  # type: ignore[attr-defined]
        return copy.deepcopy(position)


@contextmanager
def _undisturbed(parallel: Parallelism) -> Iterator[None]:
    """Evaluation mode without gradients; mode and random generators are put back."""
    model = parallel.model
    was_training = model.training
    devices = [] if parallel.device.type == "cpu" else [parallel.device]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=_fork_type(parallel.device)):
            yield
    finally:
        model.train(was_training)


def _fork_type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type
