"""Loss and metrics over an evaluation set: sums over its tokens divided by their number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .batch import Batch
from .errors import DataError
from .undisturbed import undisturbed

if TYPE_CHECKING:
    from .run import Run

EvalMetric = Callable[[object, Tensor], tuple[Tensor, Tensor]]
"""`(predictions, labels) -> (sum, count)`, both scalars; the metric is sum over count, over all batches.
Sums are kept and predictions dropped, so memory does not grow with the evaluation set."""


def evaluate(run: Run, loader: object, *, stop_requested: Callable[[], bool]) -> dict[str, float] | None:
    """Score a loader's batches without touching the training state or its random generators.

    Args:
        run: Holds model, loss, metrics and settings.
        loader: Batches from the beginning of the evaluation set.
        stop_requested: Asked after every batch whether to leave.

    Returns:
        `eval_loss` (nats per counted token), `eval_tokens` and `eval_<name>` for each metric; None if a stop
        was requested on any rank.

    Raises:
        DataError: If no token counts.
    """
    parallel, limit = run.parallel, run.args.max_eval_steps
    sums = torch.zeros(3 + 2 * len(run.eval_metrics), dtype=torch.float64, device=parallel.device)
    with parallel.consolidated(optimizer=False), undisturbed(parallel.model):
        for batch in islice(cast(Iterable[Batch], loader), limit if limit > 0 else None):
            figures = _score(run, batch, sums.device)
            # A dummy is scored, because the ranks compute together, and counts for nothing.
            if not getattr(loader, "last_is_dummy", False):
                sums += figures
            run.events.fire("on_prediction_step")
            if parallel.any([stop_requested()])[0]:
                return None
    batches, total, tokens, *metrics = parallel.sum(sums).tolist()
    if tokens == 0:
        raise DataError(_nothing_to_score(run, int(batches)))
    whole = int(tokens) if tokens.is_integer() else tokens
    result: dict[str, float] = {"eval_loss": total / tokens, "eval_tokens": whole}
    for name, part, count in zip(run.eval_metrics, metrics[::2], metrics[1::2], strict=True):
        result[f"eval_{name}"] = part / count if count else float("nan")
    return result


def _score(run: Run, batch: Batch, device: torch.device) -> Tensor:
    """Sums of one batch: 1, loss, counted tokens, then sum and count of each metric; float64.

    They are 0 on a rank that does not see the predictions.
    """
    scored = run.parallel.forward(batch, run.loss, run.args)
    if scored is None:
        return torch.zeros(3 + 2 * len(run.eval_metrics), dtype=torch.float64, device=device)
    figures = [torch.ones((), device=device), scored.loss, run.loss.count(scored.labels)]
    for metric in run.eval_metrics.values():
        figures += metric(scored.predictions, scored.labels)
    return torch.stack([figure.to(device=device, dtype=torch.float64) for figure in figures])


def _nothing_to_score(run: Run, batches: int) -> str:
    args = run.args
    cause = (
        "the set is empty, or smaller than what every rank needs"
        if batches == 0
        else "every label is -100, or rows are too short to predict a token from another"
    )
    return (
        f"the evaluation set gave {batches} batches and no token that counts: {cause} "
        f"(per_device_eval_batch_size={args.per_device_eval_batch_size}, "
        f"dataloader_drop_last={args.dataloader_drop_last} (training only), "
        f"max_eval_steps={args.max_eval_steps}, world size {run.parallel.env.world_size}"
        f"{run.parallel.evaluation_settings()}); give more evaluation data, or smaller batches"
    )


class EvaluationData:
    """Gives the evaluation set from its beginning, as often as asked.

    Args:
        make: Gives the loader, the same one each time or a new one.
        beginning: State to set it back to first; none for a loader that begins anew by itself.
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
