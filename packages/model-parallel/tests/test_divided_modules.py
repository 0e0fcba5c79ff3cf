"""What others see of a divided model: wrappers around it, stages of a pipeline, dry runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decoder import Decoder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_env import Meshes, ParallelLayout, fake_job
from model_parallel import shard_tensors, whole_sequences


@pytest.fixture
def mesh() -> Iterator[object]:
    with fake_job(2):
        yield Meshes(ParallelLayout(tensor=2)).tensor


@pytest.mark.parametrize("sequence", [False, True])
def test_layers_stay_of_one_class(mesh: object, sequence: bool) -> None:
    model = shard_tensors(Decoder(layers=3), mesh, sequence=sequence)  # type: ignore[arg-type]
    assert len({type(layer) for layer in model.model.layers}) == 1  # type: ignore[union-attr, arg-type]


def test_texts_of_any_length_are_written_with_whole_sequences(mesh: object) -> None:
    model = shard_tensors(Decoder(), mesh, sequence=True)  # type: ignore[arg-type]
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    with whole_sequences(model):
        assert model(tokens).shape[:2] == (2, 7)
    with pytest.raises(ValueError, match="a multiple of tensor=2"):
        model(tokens)


def test_logits_may_be_changed_in_place(mesh: object) -> None:
    model = shard_tensors(Decoder(), mesh)  # type: ignore[arg-type]
    logits = model(torch.zeros(2, 8, dtype=torch.int64))
    assert not logits._is_view()
    logits.mul_(2).sum().backward()


def test_one_of_two_tied_weights_may_be_missing(mesh: object) -> None:
    model = shard_tensors(Decoder(tied=True), mesh)  # type: ignore[arg-type]
    del model.lm_head._parameters["weight"]  # type: ignore[union-attr]
    model.model.embed_tokens(torch.zeros(2, 8, dtype=torch.int64))  # type: ignore[operator, union-attr]
    model.lm_head._parameters["weight"] = nn.Parameter(torch.zeros(1))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="share a weight, and have two now"):
        model.model.embed_tokens(torch.zeros(2, 8, dtype=torch.int64))  # type: ignore[operator, union-attr]


def test_tensors_without_values_pass_through(mesh: object) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = shard_tensors(Decoder(), mesh)  # type: ignore[arg-type]
        logits = model(torch.zeros(2, 8, dtype=torch.int64))
    assert logits.shape[:2] == (2, 8)
