"""A batch becomes microbatches of one shape, and what was filled up does not count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer_core import CausalLMLoss, DataError, is_ignored
from trainer_pipeline.microbatches import cut


def batch_of(rows: int, length: int = 5) -> dict[str, object]:
    """Every number once."""
    ids = torch.arange(rows * length).view(rows, length)
    return {"input_ids": ids, "labels": ids + 100, "attention_mask": torch.ones_like(ids)}


def tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_rows_stay_in_order_and_are_filled_up_at_the_end(rows: int, count: int) -> None:
    batch = batch_of(rows)
    pieces = cut(batch, count)
    assert len(pieces) == count
    size = -(-rows // count)
    assert {piece.labels.shape for piece in pieces} == {(size, 5)}
    ids = torch.cat([tensor(piece.inputs["input_ids"]) for piece in pieces])
    labels = torch.cat([piece.labels for piece in pieces])
    assert torch.equal(ids[:rows], tensor(batch["input_ids"]))
    assert torch.equal(labels[:rows], tensor(batch["labels"]))
    # Copies, so that no mask is empty and no token unknown.
    assert (ids[rows:] == tensor(batch["input_ids"])[-1]).all()
    assert (labels[rows:] == -100).all()
    assert ids.dtype == labels.dtype == torch.int64


def test_filled_rows_do_not_count() -> None:
    loss = CausalLMLoss()
    torch.manual_seed(0)
    batch = {"input_ids": torch.zeros(3, 5, dtype=torch.int64), "labels": torch.randint(0, 7, (3, 5))}
    logits = torch.randn(3, 5, 7)
    padded = torch.cat([logits, torch.randn(1, 5, 7)])
    pieces = cut(batch, 2)
    losses = [loss(padded[2 * n : 2 * n + 2], piece.labels) for n, piece in enumerate(pieces)]
    assert float(torch.stack(losses).sum()) == pytest.approx(float(loss(logits, batch["labels"])))
    assert sum(int(loss.count(piece.labels)) for piece in pieces) == int(loss.count(batch["labels"])) == 12


def test_labels_are_no_input() -> None:
    batch = batch_of(4)
    for piece in cut(batch, 2):
        assert set(piece.inputs) == {"input_ids", "attention_mask"}
    assert set(batch) == {"input_ids", "labels", "attention_mask"}, "the batch stays as it is"


def test_what_has_no_rows_goes_to_all() -> None:
    bias = torch.randn(1, 5, 5)
    scale, words = torch.tensor(0.5), ["a", "b", "c"]
    batch = batch_of(3) | {"bias": bias, "scale": scale, "words": words, "use_cache": False, "nothing": None}
    for piece in cut(batch, 2):
        assert piece.inputs["bias"] is bias
        assert piece.inputs["scale"] is scale
        assert piece.inputs["words"] is words
        assert piece.inputs["use_cache"] is False
        assert piece.inputs["nothing"] is None


def test_what_has_rows_is_cut_whatever_its_shape() -> None:
    weights = torch.tensor([0.5, 0.25, 1.0])
    mask = torch.ones(3, 1, 5, 5, dtype=torch.bool).tril()
    first, second = cut(batch_of(3) | {"weights": weights, "mask": mask}, 2)
    assert tensor(first.inputs["weights"]).tolist() == [0.5, 0.25]
    assert tensor(second.inputs["weights"]).tolist() == [1.0, 1.0]
    for piece in (first, second):
        assert torch.equal(tensor(piece.inputs["mask"]), mask[:2])


def test_whole_batches_are_not_copied() -> None:
    batch = batch_of(4)
    pieces = cut(batch, 2)
    assert tensor(pieces[0].inputs["input_ids"]).data_ptr() == tensor(batch["input_ids"]).data_ptr()


def test_rows_that_fill_up_do_not_count_whatever_the_labels() -> None:
    batch = {"x": torch.ones(3, 2), "labels": torch.tensor([1.0, 2.0, 3.0])}
    labels = torch.cat([piece.labels for piece in cut(batch, 2)])
    assert labels[:3].tolist() == [1.0, 2.0, 3.0]
    assert is_ignored(labels).tolist() == [False, False, False, True]
    for unsigned in (torch.uint8, torch.bool):
        with pytest.raises(DataError, match=r"labels\.long\(\)"):
            cut(batch | {"labels": batch["labels"].to(unsigned)}, 2)
    with pytest.raises(DataError, match="single number"):
        cut(batch | {"labels": torch.tensor(1)}, 2)
