"""Experts divided over ranks: output, loss and every gradient are those of one process with all tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from experts import CASES, EXPERTS, HIDDEN, WIDTH, Block, Weights, mistakes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dist_env import Meshes, ParallelLayout, fake_job
from model_parallel import divide_experts

Notes = list[dict[str, Any]]
PARTS: dict[int, list[str]] = {
    1: ["cases", "same"],
    2: ["cases", "same", "mistakes", "decoder", "uses", "others", "refusals"],
    4: ["cases", "same", "decoder", "shared", "refusals"],
}


@pytest.fixture(scope="module")
def notes(launch: Callable[..., list[Any]]) -> dict[int, Notes]:
    return {ranks: launch("experts.py", ranks, *parts, timeout=120.0) for ranks, parts in PARTS.items()}


def check(found: dict[str, float], limit: float) -> None:
    assert found
    assert all(deviation < limit for deviation in found.values()), found


@pytest.mark.parametrize("ranks", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_output_loss_and_gradients_are_those_of_one_process(
    notes: dict[int, Notes], name: str, ranks: int
) -> None:
    for found in notes[ranks]:
        check(found[name], 1e-6)


@pytest.mark.parametrize("ranks", PARTS)
@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_ranks_with_the_same_tokens_each_have_the_whole_output_and_gradient(
    notes: dict[int, Notes], count: int, ranks: int
) -> None:
    for found in notes[ranks]:
        check(found[f"same, {count}"], 1e-6)


MISTAKES = [*mistakes(2), "same tokens sent by each"]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_would_be_seen(notes: dict[int, Notes], name: str) -> None:
    """Each of them moves an output or a gradient a thousand times further than these tests allow."""
    assert all(max(found[name].values()) > 1e-3 for found in notes[2])


@pytest.mark.full
def test_a_mistake_would_be_seen_on_four_ranks(launch: Callable[..., list[Any]]) -> None:
    for found in launch("experts.py", 4, "mistakes"):
        assert all(max(found[name].values()) > 1e-3 for name in MISTAKES)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *((2, f"tensor=2,ep=2, {sequence}") for sequence in (False, True)),
        *((4, f"shard=2,tensor=2,ep=4, {sequence}") for sequence in (False, True)),
        *((4, f"tensor=4,ep=2, {sequence}") for sequence in (False, True)),
    ],
)
def test_tensors_are_divided_around_experts(notes: dict[int, Notes], ranks: int, name: str) -> None:
    for found in notes[ranks]:
        assert found[name].pop("text") == 0.0, "a text that is written token by token"
        check(found[name], 1e-5)


def test_ranks_with_the_same_experts_share_out_their_weights(notes: dict[int, Notes]) -> None:
    for found in notes[4]:
        check(found["shared"], 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "checkpointed",
        "checkpointed, a rank whose experts have no token",
        "checkpointed, a rank without tokens",
        "twice in a pass",
        "frozen experts",
        "frozen up",
        "frozen router",
        "frozen experts, no token",
        "the experts alone",
    ],
)
def test_gradients_however_the_layer_is_used(notes: dict[int, Notes], name: str) -> None:
    for found in notes[2]:
        check(found["uses"][name], 1e-6)


def test_autocast(notes: dict[int, Notes]) -> None:
    for found in notes[2]:
        check(found["uses"]["bfloat16"], 2e-2)


# It takes each rank many seconds to compile.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_compiled_blocks(launch: Callable[..., list[Any]], ranks: int) -> None:
    """Experts run as they are, between compiled parts."""
    for found in launch("experts.py", ranks, "compiled"):
        check(found["compiled"], 1e-6)


def test_passes_without_gradients_copies_and_checkpoints(notes: dict[int, Notes]) -> None:
    for found in notes[2]:
        others = found["others"]
        assert others["names"], "those of parameters stay"
        for name in ("no_grad", "inference", "inference, same tokens", "copy", "loaded", "values"):
            assert others[name] < 1e-6, name


def test_a_graph_that_is_kept_gives_the_same_gradients_again(notes: dict[int, Notes]) -> None:
    for found in notes[2]:
        assert found["others"]["retained"] < 1e-6


def test_gradients_of_gradients_are_refused(notes: dict[int, Notes]) -> None:
    for found in notes[2]:
        assert "once_differentiable" in found["others"]["second order"]


def test_a_rank_holds_its_experts_only(notes: dict[int, Notes]) -> None:
    for found in notes[2]:
        assert found["others"]["held"] == [EXPERTS // 2, HIDDEN, WIDTH]
        assert found["others"]["storage"] == EXPERTS // 2 * HIDDEN * WIDTH


NO_EXPERTS = "The model Decoder has no experts that can be divided"
REFUSALS = {
    "without experts": NO_EXPERTS,
    "a count that does not divide": "expert=[24] does not divide the 7 experts of Chosen. Allowed .* 1, 7.",
    "another parameter": r"The experts Chosen have scale beside parameters of the shape \[8, ...\]",
    "a number": "The experts Chosen have scale beside parameters",
    "modules with parameters": "The experts Chosen have norm.weight, norm.bias beside parameters",
    "a number that is a property": "a module with an attribute num_experts",
    "a buffer": "The experts Chosen have seen beside parameters",
    "tied": "share up with another module",
    "adapted": "The experts base_layer are adapted by another module, such as by target_parameters of PEFT",
    "divided already": "The model is divided already. Divide experts first",
    "tensors divided already": "The model is divided already. Divide experts first",
    "two dimensions": "mesh has 2 dimensions, and experts are divided over one",
    "same tokens of two dimensions": "same_tokens has 2 dimensions",
    "same tokens on one rank": r"Rank\(s\) [13] of the mesh have other experts or another same_tokens",
    "other models": r"Rank\(s\) [13] of the mesh have other experts",
    "other names": r"Rank\(s\) [13] of the mesh have other experts",
    "a replaced forward": "mixture.experts have a forward that was replaced on the object",
    "an unknown keyword": r"the names \['scale'\]. Where they are divided they take hidden_states",
    "a fourth argument": "called with 4 arguments",
    "an argument twice": r"called with 3 arguments and the names \['top_k_index'\]",
    "without weights": "called with 2 arguments",
    "more tokens than choices": r"hidden_states \[6, 16\], top_k_index \[3, 1\], top_k_weights \[3, 1\]",
    "weights of another shape": r"top_k_weights \[1, 3\]. Give tokens \[tokens, hidden\], and choices",
    "rows of tokens": r"hidden_states \[1, 3, 16\]",
    "an expert beyond the last": "out of bounds",
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", REFUSALS)
def test_every_rank_refuses_and_none_hangs(notes: dict[int, Notes], name: str, ranks: int) -> None:
    for found in notes[ranks]:
        kind, text, seconds = found["refusals"][name]
        assert kind in ("PlanError", "TypeError", "ValueError", "RuntimeError"), kind
        assert re.search(REFUSALS[name], text), text
        assert seconds < 5.0


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("who", ["first", "last"])
def test_a_rank_that_refuses_says_why_and_the_others_where(
    notes: dict[int, Notes], who: str, ranks: int
) -> None:
    refusing = 0 if who == "first" else ranks - 1
    for rank, found in enumerate(notes[ranks]):
        kind, text, _ = found["refusals"][f"refused by the {who}"]
        expected = NO_EXPERTS if rank == refusing else f"The experts were refused on rank(s) {refusing} of"
        assert kind == "PlanError"
        assert expected in text
        assert found["refusals"]["untouched"][0] == "True", "nothing was divided"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_job(4, rank=1):
        expert = Meshes(ParallelLayout(tensor=4, expert=4)).expert
        assert expert is not None
        yield expert


@pytest.mark.parametrize("same", [False, True])
def test_tensors_without_values_pass_through(mesh: DeviceMesh, same: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = dense()
        divide_experts(model, mesh, same_tokens=mesh if same else None)
        passed_through(model, torch.zeros(10, WIDTH))


@pytest.mark.parametrize("same", [False, True])
def test_a_model_on_the_meta_device(mesh: DeviceMesh, same: bool) -> None:
    with torch.device("meta"):
        model = dense()
        divide_experts(model, mesh, same_tokens=mesh if same else None)
        passed_through(model, torch.zeros(10, WIDTH))


def test_a_fake_job_with_values(mesh: DeviceMesh) -> None:
    model = dense()
    divide_experts(model, mesh)
    passed_through(model, torch.zeros(10, WIDTH))


class Dense(Weights):
    """Every expert computes every token: what others look for, such as their tokens, has no shape here."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        share = top_k_weights.new_zeros(len(hidden_states), self.num_experts)
        share = share.scatter(1, top_k_index, top_k_weights)
        inner = torch.einsum("tw,ehw->teh", hidden_states, self.up) + self.bias
        return torch.einsum("teh,ewh,te->tw", self.act_fn(inner), self.down, share)


def dense() -> Block:
    model = Block()
    model.mixture.experts = Dense()
    return model


def passed_through(model: nn.Module, x: torch.Tensor) -> None:
    y = model(x)
    assert y.shape == x.shape
    y.sum().backward()
    up = model.mixture.experts.up  # type: ignore[union-attr]
    assert isinstance(up, DTensor)
    assert up.shape == (EXPERTS, HIDDEN, WIDTH)
    assert isinstance(up.grad, DTensor)
    assert up.grad.to_local().shape == (EXPERTS // 4, HIDDEN, WIDTH)
