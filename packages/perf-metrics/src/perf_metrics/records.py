"""Which kind of log record it is: of a training interval, of an evaluation, or of the end of the run."""

from __future__ import annotations

from collections.abc import Mapping


def is_training(record: Mapping[str, object]) -> bool:
    """Whether the record is of a training interval."""
    return "loss" in record


def is_evaluation(record: Mapping[str, object]) -> bool:
    """Whether the record holds the results of an evaluation."""
    return not is_training(record) and any(key.startswith("eval_") for key in record)


def is_final(record: Mapping[str, object]) -> bool:
    """Whether the record holds the final metrics.

    `transformers.Trainer` has `train_runtime` in the records of its intervals too, where it counts tokens.
    """
    return not is_training(record) and "train_runtime" in record
