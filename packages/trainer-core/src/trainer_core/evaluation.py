"""Loss and metrics over an evaluation set: sums over its tokens divided by their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import Tensor

from dataloader_dispatch import end_workers

from .data.loaders import Batch, labels_of, prefix_of, row_length, with_targets
from .errors import DataError
from .model.run_settings import inference_mode_guard
from .run import Run


def evaluate(
    run: Run, loader: Iterable[Batch], name: str = "", *, stop_requested: Callable[[], bool]
) -> dict[str, float] | None:
    """Score a loader's batches without touching the training state or its random generators.

    Args:
        run: Holds model, loss, metrics and settings.
        loader: Batches from the beginning of the evaluation set.
        name: Of the set, if there are several; the metrics begin with `eval_<name>_` then.
        stop_requested: Asked after every batch whether to leave.

    Returns:
        `eval_loss` (nats per counted token), `eval_tokens` and `eval_<name>` for each metric; None if a stop
        was requested on any rank.

    Raises:
        DataError: If no token counts.
    """
    ranks, limit = run.ranks, run.args.max_eval_steps
    sums = torch.zeros(3 + 2 * len(run.eval_metrics), dtype=torch.float64, device=ranks.device)
    with run.built.synced_weights(optimizer=False), inference_mode_guard(run.built.model):
        batches = iter(loader)
        try:
            for batch in islice(batches, limit if limit > 0 else None):
                figures = _score(run, batch, sums.device)
                # A dummy is scored, because the ranks compute together, and counts for nothing.
                if not getattr(loader, "last_is_dummy", False):
                    sums += figures
                run.events.fire("on_prediction_step")
                if ranks.any([stop_requested()])[0]:
                    return None
        finally:
            if not run.args.dataloader_persistent_workers:
                end_workers(loader, batches)
    # The loss is known on the ranks that hold the end of the model; those that share out layers or sequences
    # have the same.
    counts = ranks.coordinates["tensor"] == ranks.coordinates["context"] == 0
    count_of_batches, total, tokens, *metrics = ranks.sum(sums, counts=counts).tolist()
    if tokens == 0:
        raise DataError(_nothing_to_score(run, int(count_of_batches), name))
    whole = int(tokens) if tokens.is_integer() else tokens
    prefix = prefix_of(name)
    result: dict[str, float] = {f"{prefix}loss": total / tokens, f"{prefix}tokens": whole}
    for metric, part, count in zip(run.eval_metrics, metrics[::2], metrics[1::2], strict=True):
        result[f"{prefix}{metric}"] = part / count if count else float("nan")
    return result


def _score(run: Run, batch: Batch, device: torch.device) -> Tensor:
    """Sums of one batch: 1, loss, counted tokens, then sum and count of each metric; float64.

    They are 0 on a rank that does not see the predictions.
    """
    scored = run.built.forward(with_targets(batch, run.loss), run.loss)
    if scored is None:
        return torch.zeros(3 + 2 * len(run.eval_metrics), dtype=torch.float64, device=device)
    labels = labels_of(batch).to(device, non_blocking=True)
    figures = [torch.ones((), device=device), scored.loss, run.loss.count(labels)]
    if run.eval_metrics:
        predictions = run.built.whole_predictions(scored.predictions, row_length(labels))
        for metric in run.eval_metrics.values():
            figures += metric(predictions, labels)
    return torch.stack([figure.to(device=device, dtype=torch.float64) for figure in figures])


def _nothing_to_score(run: Run, batches: int, name: str) -> str:
    args = run.args
    settings = f", {told}" if (told := run.placement.settings()) else ""
    cause = (
        "the set is empty, or smaller than what every rank needs"
        if batches == 0
        else "every label is -100, or rows are too short to predict a token from another"
    )
    return (
        f"the evaluation set{f' {name!r}' if name else ''} gave {batches} batches and no token that counts: "
        f"{cause} "
        f"(per_device_eval_batch_size={args.per_device_eval_batch_size}, "
        f"dataloader_drop_last={args.dataloader_drop_last} (training only), "
        f"max_eval_steps={args.max_eval_steps}, world size {run.ranks.env.world_size}"
        f"{settings}). Give more evaluation data, or smaller batches."
    )
