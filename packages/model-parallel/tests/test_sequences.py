"""Sequences divided over ranks train on the curve of one process, whatever their lengths and documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dist_env import DistributedEnvironment, Meshes, ParallelLayout
from model_parallel import CausalAttention, PlanError, SequencePart, divide_sequences

CASES: dict[str, dict[str, Any]] = {
    "plain": {"length": 16},
    "contiguous": {"length": 16, "balanced": False},
    "a length that nothing divides": {"length": 17},
    "contiguous, a length that nothing divides": {"length": 19, "balanced": False},
    "documents across the cuts": {"length": 24, "documents": [7, 10, 7]},
    "documents, a length that nothing divides": {"length": 23, "documents": [1, 11, 3, 8]},
    "contiguous documents": {"length": 23, "documents": [5, 13, 5], "balanced": False},
    "a rank that counts no token": {"length": 16, "uncounted": 12, "balanced": False},
    "padding": {"length": 16, "padded": 11},
    "masks made for some queries at a time": {"length": 32, "mask": 64},
    "documents, masks made for some queries at a time": {"length": 32, "documents": [9, 23], "mask": 128},
    "ring": {"length": 17, "exchange": "ring"},
    "ring, contiguous": {"length": 19, "exchange": "ring", "balanced": False},
    "ring, documents": {"length": 23, "documents": [1, 11, 3, 8], "exchange": "ring"},
    "ring, documents, a few queries at a time": {
        "length": 32,
        "documents": [9, 23],
        "exchange": "ring",
        "mask": 128,
    },
}
# What two ranks do by default; three ranks do everything.
FEW = ("plain", "contiguous", "documents, a length that nothing divides", "ring", "ring, documents")
# Compiled on each rank, for seconds.
COMPILED = {
    "flex, ring, documents": {
        "length": 400,
        "documents": [173, 93, 134],
        "exchange": "ring",
        "kernel": "flex",
    },
}
MORE_COMPILED = {
    "flex": {"length": 17, "kernel": "flex"},
    "flex, documents": {"length": 400, "documents": [7, 261, 132], "kernel": "flex"},
}


def noted(
    launch: Callable[..., list[Any]], cases: dict[str, dict[str, Any]], *worlds: int
) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each world noted, by case."""
    found = [launch("sequences.py", ranks, *cases.values()) for ranks in worlds]
    return {name: [rank[place] for ranks in found for rank in ranks] for place, name in enumerate(cases)}


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> dict[str, list[dict[str, Any]]]:
    few, all_cases = noted(launch, {name: CASES[name] for name in FEW}, 2), noted(launch, CASES, 3)
    return {name: few.get(name, []) + ranks for name, ranks in all_cases.items()} | noted(launch, COMPILED, 2)


@pytest.mark.parametrize("name", [*CASES, *COMPILED])
def test_the_curve_is_that_of_one_process(notes: dict[str, list[dict[str, Any]]], name: str) -> None:
    for found in notes[name]:
        assert found["loss"] < 1e-6, found
        assert found["norm"] < 5e-6, found
        assert found["whole"] < 1e-5, found


@pytest.mark.parametrize("name", [name for name in (*CASES, *COMPILED) if "documents" in name])
def test_logits_of_a_document_are_those_of_it_alone(
    notes: dict[str, list[dict[str, Any]]], name: str
) -> None:
    for found in notes[name]:
        assert found["alone"] < 1e-5, found


@pytest.mark.full
def test_two_ranks_have_the_curve_of_one_process_in_every_way(launch: Callable[..., list[Any]]) -> None:
    for name, ranks in noted(launch, {name: CASES[name] for name in CASES if name not in FEW}, 2).items():
        test_the_curve_is_that_of_one_process({name: ranks}, name)
        if "documents" in name:
            test_logits_of_a_document_are_those_of_it_alone({name: ranks}, name)


@pytest.mark.full
def test_compiled_kernels_of_whole_rows_give_the_curve_of_one_process(
    launch: Callable[..., list[Any]],
) -> None:
    for name, ranks in noted(launch, COMPILED | MORE_COMPILED, 3).items():
        test_the_curve_is_that_of_one_process({name: ranks}, name)
        if "documents" in name:
            test_logits_of_a_document_are_those_of_it_alone({name: ranks}, name)


def test_a_ring_keeps_keys_and_values_of_its_own_positions_only(
    notes: dict[str, list[dict[str, Any]]],
) -> None:
    of_one = 2 * 512 * 8 * 4  # bytes: heads, positions, features, float32
    sums = 2 * 512 * 4  # a float for each query
    around, gathered = ([each["kept"] for each in notes[name]] for name in ("ring", "plain"))
    assert set(around) == {4 * of_one + sums}, "queries, keys, values and outputs"
    for kept, ranks in zip(gathered, (2, 2, 3, 3, 3), strict=True):
        assert kept > (1 + 2 * ranks) * of_one, "whole keys and values"


def test_logits_of_a_document_are_those_of_it_alone_on_one_device() -> None:
    torch.manual_seed(0)
    attend = CausalAttention()
    query, key, value = torch.randn(2, 4, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    whole = attend(query, key, value, documents)
    for row, start, end in ((0, 0, 5), (0, 5, 12), (1, 0, 12)):
        own = [each[row : row + 1, :, start:end] for each in (query, key, value)]
        torch.testing.assert_close(whole[row : row + 1, :, start:end], attend(*own))
    with pytest.raises(ValueError, match="there are 12 queries and 5 keys"):
        attend(query, key[:, :, :5], value[:, :, :5])
    with pytest.raises(ValueError, match="there are 2 rows and 12 keys"):
        attend(query, key, value, documents[:, :6])


def test_a_whole_row_of_any_length_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[bool] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        masks.append(attn_mask is not None)
        return real(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr("model_parallel.attention.F.scaled_dot_product_attention", watched)
    x = torch.randn(1, 1, 4096, 8)
    whole = CausalAttention()(x, x, x)
    assert masks == [False], "kernels without a mask are the fast ones"
    within = CausalAttention()(x, x, x, torch.zeros(1, 4096, dtype=torch.int64))
    assert set(masks[1:]) == {True}
    torch.testing.assert_close(whole, within)


@pytest.fixture
def part() -> Callable[..., SequencePart]:
    class Of:
        """Stands for the mesh where only its size and place are asked for."""

        def __init__(self, ranks: int, rank: int) -> None:
            self.size, self.get_local_rank = lambda: ranks, lambda: rank

    return lambda ranks, rank, **settings: SequencePart(Of(ranks, rank), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("length", [1, 12, 17])
def test_parts_are_the_row_and_padding(
    part: Callable[..., SequencePart], ranks: int, length: int, balanced: bool
) -> None:
    ids = torch.arange(1, length + 1)[None]
    seen: dict[int, tuple[int, int]] = {}
    for rank in range(ranks):
        cut = part(ranks, rank, balanced=balanced, multiple=2).cut(
            {"input_ids": ids, "labels": ids, "other": 3}
        )
        assert cut["other"] == 3
        assert cut["input_ids"].shape[1] % 2 == 0
        for token, target, position in zip(
            *(cut[name][0].tolist() for name in ("input_ids", "labels", "position_ids")), strict=True
        ):
            if target == -100:
                assert position == length - 1, "within the tables of the model"
            else:
                assert token not in seen
                seen[token] = (target, position)
    assert seen == {token: (token, token - 1) for token in range(1, length + 1)}


def test_a_batch_that_cannot_be_cut_is_refused(part: Callable[..., SequencePart]) -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="has the keys \\['images'\\]"):
        part(2, 0).cut({"images": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"attention_mask has the shape \[2, 1, 8, 8\]"):
        part(2, 0).cut({"input_ids": ids, "attention_mask": torch.ones(2, 1, 8, 8)})
    with pytest.raises(ValueError, match=r"labels have the shape \[2\]"):
        part(2, 0).cut({"input_ids": ids, "labels": torch.zeros(2, dtype=torch.int64)})
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    with pytest.raises(ValueError, match="labels count where attention_mask is 0"):
        part(2, 0).cut({"input_ids": ids, "labels": ids, "attention_mask": mask})
    with pytest.raises(
        ValueError, match="rows have 8 positions, but the model has max_position_embeddings=7"
    ):
        part(2, 0, longest=7).cut({"input_ids": ids})
    left = torch.ones_like(ids)
    left[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask has padding before tokens"):
        part(2, 0).cut({"input_ids": ids, "attention_mask": left})
    with pytest.raises(ValueError, match=r"pixels has the shape \[2, 3\]"):
        part(2, 0).cut({"input_ids": ids, "pixels": torch.ones(2, 3)})


def test_a_model_that_attends_by_itself_is_refused() -> None:
    with DistributedEnvironment(no_accelerator=True):
        mesh = Meshes(ParallelLayout()).context
        with pytest.raises(PlanError, match="Sequences of Linear cannot be divided: it has no module"):
            divide_sequences(nn.Linear(2, 2), mesh)
