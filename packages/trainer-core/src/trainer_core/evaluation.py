"""Loss over an evaluation set: a sum over its tokens divided by their number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple, cast

import torch
from torch import nn

from checkpoint_core import RNGState

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
    with _undisturbed(parallel.model):
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
        make: Gives the loader.
        beginning: State to set it back to first, for a ready-made loader that keeps a position.
    """

    def __init__(self, make: Callable[[], object], beginning: object | None = None) -> None:
        self._make = make
        self._beginning = beginning

    def fresh(self) -> object:
        """A loader at the beginning of the set."""
        loader = self._make()
        if self._beginning is not None:
            loader.load_state_dict(copy.deepcopy(self._beginning))  # type: ignore[attr-defined]
        return loader


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode of every module and all random generators are put back."""
    modes = {module: module.training for module in model.modules()}
    generators = RNGState()
    before = generators.state_dict()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        generators.load_state_dict(before)
        for module, training in modes.items():
            module.training = training
