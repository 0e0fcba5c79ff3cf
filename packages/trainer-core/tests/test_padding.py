"""Batches of rows of unequal length, and the labels of what is to be continued."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer_core import DataError, PaddingCollator, is_ignored


def listed(batch: dict[str, torch.Tensor]) -> dict[str, object]:
    return {name: value.tolist() for name, value in batch.items()}


def test_rows_are_padded_and_their_tokens_are_the_labels() -> None:
    batch = PaddingCollator(pad_token_id=9)([{"input_ids": [1, 2, 3]}, {"input_ids": torch.tensor([4])}])
    assert listed(batch) == {
        "input_ids": [[1, 2, 3], [4, 9, 9]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[1, 2, 3], [4, -100, -100]],
    }


def test_prompts_do_not_count() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]},
        {"input_ids": [4, 5], "completion_mask": [False, True]},
    ]
    batch = PaddingCollator()(rows)
    assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, 5, -100]]
    given = [{**row, "labels": [7] * len(row["input_ids"])} for row in rows]  # type: ignore[arg-type]
    assert PaddingCollator()(given)["labels"].tolist() == [[-100, 7, 7], [-100, 7, -100]]


def test_padding_that_rows_bring_along_does_not_count() -> None:
    rows = [
        {"input_ids": [1, 2, 0, 0], "attention_mask": [1, 1, 0, 0], "completion_mask": [0, 1, 1, 1]},
        {"input_ids": [0, 4, 5], "attention_mask": [0, 1, 1], "completion_mask": [1, 1, 1]},
    ]
    assert PaddingCollator()(rows)["labels"].tolist() == [[-100, 2, -100, -100], [-100, 4, 5, -100]]
    for row in rows:
        del row["completion_mask"]
    assert PaddingCollator()(rows)["labels"].tolist() == [[1, 2, -100, -100], [-100, 4, 5, -100]]
    given = [{**row, "labels": [7] * len(row["input_ids"])} for row in rows]
    assert PaddingCollator()(given)["labels"].tolist() == [[7, 7, 7, 7], [7, 7, 7, -100]]


def test_single_numbers_are_stacked_and_what_is_given_stays() -> None:
    rows = [
        {"input_ids": [1], "attention_mask": [0], "labels": 2, "weight": 0.5},
        {"input_ids": [3, 4], "attention_mask": [1, 0], "labels": 0, "weight": 1.0},
    ]
    batch = PaddingCollator()(rows)
    assert listed(batch) == {
        "input_ids": [[1, 0], [3, 4]],
        "attention_mask": [[0, 0], [1, 0]],
        "labels": [2, 0],
        "weight": [0.5, 1.0],
    }
    numbers = PaddingCollator()([{"x": [1.0, 2.0], "labels": [0.5, 1.5]}, {"x": [3.0], "labels": [2.5]}])
    assert numbers["x"].tolist() == [[1.0, 2.0], [3.0, 0.0]]
    assert is_ignored(numbers["labels"]).tolist() == [[False, False], [False, True]]
    assert numbers["labels"][0].tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"input_ids": [1]}, {"input_ids": [1], "weight": 1.0}], "different keys"),
        ([{"input_ids": [1, 2], "completion_mask": [1]}], r"completion_mask of shape \[1\]"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 1, 1]}], r"attention_mask of shape \[3\]"),
        ([[1, 2]], "type list"),
    ],
)
def test_what_does_not_belong_together_is_refused(rows: list[Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        PaddingCollator()(rows)
