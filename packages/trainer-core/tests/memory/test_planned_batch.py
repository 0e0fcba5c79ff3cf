"""What a plan feeds a model has the shapes of what a run feeds it."""

from __future__ import annotations

import pytest
import torch

from trainer_core import ConfigurationError, PlannedBatch


def test_rows_of_a_length() -> None:
    made = PlannedBatch(sequence_length=16).of(3, torch.device("meta"))
    assert {name: (tuple(value.shape), value.dtype) for name, value in made.items()} == {
        "input_ids": ((3, 16), torch.int64),
        "labels": ((3, 16), torch.int64),
    }
    assert {value.device.type for value in made.values()} == {"meta"}


def test_of_a_batch_that_is_given_only_shapes_and_dtypes_count() -> None:
    batch = {"pixels": torch.randn(2, 3, 8), "labels": torch.ones(2, 4, dtype=torch.int64)}
    made = PlannedBatch(batch=batch).of(7, torch.device("cpu"))
    assert {name: (value.shape, value.dtype) for name, value in made.items()} == {
        name: (value.shape, value.dtype) for name, value in batch.items()
    }
    assert not any(value.any() for value in made.values())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "is needed to know the activations"),
        ({"sequence_length": 8, "batch": {"labels": torch.zeros(1, 8)}}, "give one of"),
        ({"sequence_length": 1}, "must be at least 2"),
        ({"batch": {"input_ids": torch.zeros(2, 4)}}, "has no tensor 'labels'"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        PlannedBatch(**given)
