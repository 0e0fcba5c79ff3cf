"""What the data-parallel benchmark found: the samples of its ranks, brought down to figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from _ddp_contenders import BARE, BARE_FUSED, CONTENDERS
from _step_contenders import Contender, Sample
from _step_report import _all, _compare, _spread
from _step_work import Window

Samples = Mapping[str, Sequence[Sample]]
"""By label, one sample of each round."""


def mean_of_ranks(by_rank: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, list[Sample]]:
    """One sample in place of those of all ranks: the mean of each window, and of the set-up.

    Args:
        by_rank: Of each rank the fields of its samples, by label: what ranks can send.
    """
    return {
        label: [_mean_sample(samples) for samples in zip(*(told[label] for told in by_rank), strict=True)]
        for label in by_rank[0]
    }


def _mean_sample(samples: Sequence[Mapping[str, Any]]) -> Sample:
    windows = [_mean(windows) for windows in zip(*(sample["windows"] for sample in samples), strict=True)]
    return Sample(windows, _mean([sample["setup"] for sample in samples]))


def _mean(windows: Sequence[Mapping[str, float]]) -> Window:
    return Window(
        statistics.fmean(window["cpu"] for window in windows),
        statistics.fmean(window["wall"] for window in windows),
    )


def summarise(samples: Samples) -> dict[str, Any]:
    """The figures of one size, by label: those of a rank, as the mean of the ranks.

    A paired difference is that of the medians of two contenders in the same round. A quiet figure compares
    the 10th percentiles of all windows: what both cost when nothing else ran.
    """
    return {
        contender.label: {
            "ours": contender.ours,
            "optimizer": contender.optimizer,
            "data": contender.data,
            "logs": contender.logs,
            "cpu_ms": _spread(_all(samples[contender.label], "cpu")),
            "wall_ms": _spread(_all(samples[contender.label], "wall")),
            "over_bare": _compare(samples[contender.label], samples[BARE.label]),
            "over_bare_same_optimizer": _compare(
                samples[contender.label], samples[_same_optimizer(contender).label]
            ),
            "setup_cpu_ms": _spread([sample.setup.cpu for sample in samples[contender.label]]),
            "setup_wall_ms": _spread([sample.setup.wall for sample in samples[contender.label]]),
        }
        for contender in CONTENDERS
    }


def _same_optimizer(contender: Contender) -> Contender:
    return BARE_FUSED if contender.optimizer == "fused" else BARE
