"""Loss and metrics over an evaluation set: sums over its tokens divided by their number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from dataloader_dispatch import end_workers

from .batch import Batch
from .errors import ConfigurationError, DataError
from .undisturbed import undisturbed

if TYPE_CHECKING:
    from .run import Run

EvalMetric = Callable[[object, Tensor], tuple[Tensor, Tensor]]
"""`(predictions, labels) -> (sum, count)`, both scalars; the metric is sum over count, over all batches.
Sums are kept and predictions dropped, so memory does not grow with the evaluation set."""


def evaluate(
    run: Run, loader: object, name: str = "", *, stop_requested: Callable[[], bool]
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
    with run.built.synced_weights(optimizer=False), undisturbed(run.built.model):
        batches = iter(cast(Iterable[Batch], loader))
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
    # The loss is known on the ranks that hold the end of the model; those of a tensor group have the same.
    counts = ranks.coordinates["tensor"] == 0
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
    scored = run.built.executor.forward(batch, run.loss)
    if scored is None:
        return torch.zeros(3 + 2 * len(run.eval_metrics), dtype=torch.float64, device=device)
    figures = [torch.ones((), device=device), scored.loss, run.loss.count(scored.labels)]
    for metric in run.eval_metrics.values():
        figures += metric(scored.predictions, scored.labels)
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
        f"{settings}); give more evaluation data, or smaller batches"
    )


def prefix_of(name: str) -> str:
    """What the metrics of an evaluation set begin with; the only set of a run has the name ''."""
    return f"eval_{name}_" if name else "eval_"


def names_of_sets(data: object) -> list[str]:
    """The names of evaluation sets given in a mapping; one empty name for a set that is given alone.

    Raises:
        ConfigurationError: If the mapping is empty, or a name is not a text that metrics can begin with.
    """
    if not isinstance(data, Mapping):
        return [""]
    for name in data:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                "eval_dataset", name, "names an evaluation set and must be a text", "call it 'held_out', say"
            )
    if not data:
        raise ConfigurationError("eval_dataset", data, "has no evaluation set in it", "give one, or None")
    return list(data)


def result_names(data: object, metrics: Iterable[str]) -> list[str]:
    """The keys of an evaluation's result.

    Raises:
        ConfigurationError: If two sets would give the same one.
    """
    kinds = ("loss", "tokens", "seconds", *metrics)
    keys = [f"{prefix_of(name)}{kind}" for name in names_of_sets(data) for kind in kinds]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            "eval_dataset", sorted(names_of_sets(data)), f"gives {twice} twice", "rename a set or a metric"
        )
    return keys


class EvaluationData:
    """Gives the evaluation set from its beginning, as often as asked.

    Args:
        make: Gives the loader, the same one each time or a new one.
        beginning: State to set it back to first; none for a loader that begins anew by itself.
    """

    def __init__(self, make: Callable[[], object], beginning: object | None = None) -> None:
        self._make = make
        self._beginning = beginning
        self.last: object | None = None
        """The loader that was given last."""

    def fresh(self) -> object:
        """A loader at the beginning of the set."""
        loader = self._make()
        if self._beginning is not None:
            loader.load_state_dict(copy.deepcopy(self._beginning))  # type: ignore[attr-defined]
        self.last = loader
        return loader


EvaluationSets = Mapping[str, EvaluationData]
"""The evaluation sets of a run by name; a set that is given alone has the name ''."""


def loaders_of(sets: EvaluationSets | None) -> object:
    """What callbacks are given: the loader of the evaluation data, or those of several sets by name."""
    loaders = {name: data.fresh() for name, data in (sets or {}).items()}
    return loaders.get("", loaders or None)
