"""Plans and sizes that a model cannot be divided with: refused by name, with what would be allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import Decoder
from torch import nn

from dist_env import Meshes, ParallelLayout, fake_job
from model_parallel import PlanError, check_plan, tensor_plan
from model_parallel.experts import Dispatched
from model_parallel.plan import as_kind
from model_parallel.styles import Colwise, Vocabulary

PLAN = Decoder().tp_plan


def without(*names: str) -> dict[str, str]:
    return {name: style for name, style in PLAN.items() if not name.endswith(names)}


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "heads": (
        {"width": 48, "heads": 6, "kv_heads": 6},
        {"tensor": 4},
        "6 heads of .*self_attn. Allowed .* 1, 2, 3, 6.",
    ),
    "key-value heads": (
        {"heads": 12, "width": 48, "kv_heads": 3},
        {"tensor": 2},
        "12 heads and 3 key-value .* 1, 3, 6, 12.",
    ),
    "width": ({"inner": 9}, {"tensor": 4}, r"without any of the 9 outputs of .*gate_proj. Allowed .* 3"),
    "vocabulary": ({"vocabulary": 5}, {"tensor": 4}, r"without any of the 5 rows of model.embed_tokens"),
    "an unknown style": (
        {},
        {"plan": {"lm_head": "colwsie"}},
        "colwsie' is not a style. Did you mean 'colwise'",
    ),
    "experts": ({}, {"plan": {"lm_head": "moe_tp_experts"}}, "divides experts"),
    "a name that matches nothing": (
        {},
        {"plan": {"model.layers.*.mlp.up": "colwise"}},
        "Did you mean 'model.layers",
    ),
    "a parameter": ({}, {"plan": {"lm_head.weight": "colwise"}}, "only modules can be divided"),
    "an empty plan": ({}, {"plan": {}}, "nothing would be divided"),
    "two rules": (
        {},
        {"plan": {**PLAN, "model.*.0.mlp.up_proj": "rowwise"}},
        "both match the module model.layers.0.mlp.up_proj",
    ),
    "a norm beside colwise layers": ({"norm": True}, {"plan": PLAN}, "q_norm stands beside colwise layers"),
    "a style for another layer": ({}, {"plan": {**PLAN, "model.norm": "rowwise"}}, "needs an nn.Linear"),
    "an embedding's style": ({}, {"plan": {**PLAN, "lm_head": "embedding_rowwise"}}, "needs an nn.Embedding"),
    "ties": ({"tied": True}, {"plan": {**PLAN, "lm_head": "rowwise"}}, "share a weight"),
    "no ranks": ({}, {"tensor": 0}, "is not a number of ranks"),
    "loss without a head": ({}, {"plan": without("lm_head"), "loss": True}, "loss=True needs an output head"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_before_any_rank_exists(name: str) -> None:
    model, arguments, message = BAD[name]
    with torch.device("meta"):
        made = Decoder(**model)
    with pytest.raises(PlanError, match=message) as raised:
        check_plan(made, **{"tensor": 2, **arguments})
    assert all(line.endswith((".", "?")) for line in str(raised.value).splitlines())


ON_RANKS = [name for name in BAD if name != "no ranks"]


@pytest.fixture(scope="module")
def told(launch: Callable[..., list[Any]]) -> list[Any]:
    return launch("bad_plans.py", 4, *(BAD[name][:2] for name in ON_RANKS), timeout=120.0)


@pytest.mark.parametrize("name", ON_RANKS)
def test_refused_on_every_rank_before_anything_is_divided(told: list[Any], name: str) -> None:
    """Whichever of four ranks computes with two or four: each says why, none waits for another."""
    for rank, notes in enumerate(told):
        message, seconds = notes[ON_RANKS.index(name)]
        assert re.search(BAD[name][2], message), f"rank {rank}: {message}"
        assert seconds < 5.0


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Linear has no plan of its own.*Give one, such as"):
        tensor_plan(nn.Linear(2, 2))


def test_sequences_need_to_be_divided_somewhere() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(PlanError, match="sequence=True needs the layers"):
        check_plan(model, {"0": "colwise", "1": "rowwise"}, tensor=2, sequence=True)


def test_a_replaced_forward_is_refused() -> None:
    model = Decoder()
    model.lm_head.forward = lambda x: x
    with pytest.raises(PlanError, match="lm_head has a forward that was replaced"):
        check_plan(model, tensor=2)


@pytest.fixture(scope="module")
def refused(launch: Callable[..., list[Any]]) -> list[Any]:
    return launch("refusals.py", 2, timeout=60.0)


RANKS = {
    "bad on each rank": ["tensor=2 does not divide the 3 heads"] * 2,
    "bad on one": ["refused on rank\\(s\\) 1 of the mesh", "is not a style"],
    "another plan on one": ["Rank\\(s\\) 1 of the mesh have another model, plan or setting"] * 2,
    "another setting on one": ["Rank\\(s\\) 1 of the mesh have another model, plan or setting"] * 2,
    "divided already": ["The model is divided already"] * 2,
    "two dimensions": ["mesh has 2 dimensions"] * 2,
    "a sequence that is not a multiple": ["a multiple of tensor=2"] * 2,
    "whole logits": ["must be a DTensor divided by the vocabulary"] * 2,
    "a head that is not divided": ["is not divided by its outputs"] * 2,
    "targets of another shape": ["Give one target"] * 2,
    "a target outside": ["The target 64 is outside the vocabulary of 64."] * 2,
    "a token outside": ["A token is outside the vocabulary of 64."] * 2,
    "label smoothing": ["label_smoothing=2.0 must be from 0 to 1"] * 2,
    "another batch": [r"In forward pass 2 rank\(s\) 1 of the mesh gave the model another batch"] * 2,
    "another batch later": [r"In forward pass 4 rank\(s\) 1 of the mesh gave the model another batch"] * 2,
    "other draws": [r"generator of rank\(s\) 1 of the mesh is in another state"] * 2,
    "an early norm": ["Add 'model.early': 'replicate' to the plan."] * 2,
}


@pytest.mark.parametrize("name", RANKS)
def test_every_rank_raises_and_none_hangs(refused: list[Any], name: str) -> None:
    for rank, message in enumerate(RANKS[name]):
        kind, text, seconds = refused[rank][name]
        assert kind in ("PlanError", "ValueError", "IndexError", "RuntimeError")

        assert re.search(message, text), text
        assert seconds < 5.0


def test_a_module_of_another_class_than_its_style_is_named() -> None:
    with pytest.raises(TypeError, match=r"lm_head is of the class Embedding, and .* only Linear. Give it"):
        as_kind(nn.Embedding(3, 3), nn.Linear, "lm_head")


@pytest.mark.parametrize(
    ("style", "named"), [(Colwise, "width"), (Vocabulary, "first.*count.*size"), (Dispatched, "here")]
)
def test_a_style_cannot_be_made_without_its_sizes(style: Any, named: str) -> None:
    with fake_job(2), pytest.raises(TypeError, match=named):
        style(Meshes(ParallelLayout(tensor=2)).tensor)


class Scaled(torch.Tensor):
    """Quantized weights as libraries have them: a tensor that wraps its numbers and their scale."""

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # type: ignore[return-value]

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers, args[0].scale)
        raise AssertionError(f"{func} computes with quantized weights, which only their layer does")


def test_quantized_weights_are_refused_before_they_are_divided() -> None:
    model = Decoder()
    weight = Scaled(torch.zeros(model.lm_head.weight.shape, dtype=torch.int8), torch.ones(()))
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(
        PlanError, match=r"lm_head.weight is a Scaled, .* Divide the model first, and quantize it"
    ):
        check_plan(model, tensor=2)
