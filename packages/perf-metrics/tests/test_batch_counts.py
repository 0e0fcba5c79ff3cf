from collections import UserDict

import pytest
import torch

from perf_metrics.callbacks.lightning_state import count_batch

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
LABELS = torch.tensor([[1, 2, 3, 4], [5, -100, -100, 7]])


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (IDS, (8, 8, None)),
        ((IDS, LABELS), (8, 8, None)),
        ([{"input_ids": IDS}], (8, 8, None)),
        ({"input_ids": IDS, "attention_mask": MASK}, (6, 8, None)),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, (6, 8, None)),
        # The first label of a row is predicted by nothing.
        (UserDict({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}), (6, 8, 4)),
        # A mask over pairs of positions says nothing about padding; a label per row is not a token.
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, (8, 8, None)),
        ({"input_ids": IDS, "labels": torch.ones(2)}, (8, 8, None)),
    ],
)
def test_batches_of_the_usual_layouts(batch: object, counts: tuple[int, int, int | None]) -> None:
    counted = count_batch(batch)
    assert counted is not None
    assert tuple(None if value is None else int(value) for value in counted) == counts


@pytest.mark.parametrize(
    "batch", [torch.ones(2, 3), {"pixels": torch.ones(2, 3)}, {"input_ids": [1, 2]}, [], "text", None]
)
def test_other_batches_are_not_guessed_at(batch: object) -> None:
    assert count_batch(batch) is None
