"""Models that would train wrongly without an error: divided rightly, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder import Decoder
from torch import nn
from torch.nn.utils import parametrize

from model_parallel import PlanError, check_plan


@pytest.fixture(scope="module")
def both(launch: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    return launch("silent.py", 2)


@pytest.mark.parametrize(
    "name",
    [
        "a number of heads",
        "a number of key-value heads",
        "a number of key-value heads below the ranks",
        "queries, keys and values stacked",
        "stacked, with the output in a module",
        "dropout behind an output in a module",
        "an adapter in one of three layers",
        "adapters in two of three layers",
        "a norm behind rowwise layers",
        "a norm behind rowwise layers, sequence",
        "layers twice",
        "a norm of whole inputs, replicate",
        "a norm of heads, summed",
        "a buffer of each rank",
        "tied, to_empty",
    ],
)
def test_it_is_divided_rightly(both: list[dict[str, Any]], name: str) -> None:
    for notes in both:
        assert isinstance(notes[name], float), notes[name]
        assert notes[name] < 1e-5


REFUSED = {
    "tied, untied afterwards": "share a weight, and have two now",
    "tied, in two groups, fused loss": "share a weight, and have two now",
    "the first layer left out": "before the first layer",
    "a norm of whole inputs, summed": "model.layers.0.mlp.norm .* Use 'replicate'",
    "a norm of heads, replicate": "model.layers.0.self_attn.q_norm .* Use 'replicated_with_grad_allreduce'",
    "a norm behind rowwise layers, replicate": "model.layers.0.mlp.norm works on .* Use 'sequence'",
    "frozen on one": "have another model, plan or setting",
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(both: list[dict[str, Any]], name: str) -> None:
    for notes in both:
        with pytest.raises(RuntimeError, match=REFUSED[name]):
            raise RuntimeError(notes[name])


def test_one_layer_for_queries_keys_and_values_is_divided_with_a_warning(both: list[dict[str, Any]]) -> None:
    assert "Use 'packed_colwise'" in both[0]["stacked, called colwise"]


def test_a_layer_with_a_forward_of_its_own_is_divided_with_a_warning(both: list[dict[str, Any]]) -> None:
    """Such as float8 with one scale for a weight: each rank would have its own."""
    warning = both[0]["a layer that works on its whole weight"]
    assert "model.layers.*.mlp.down_proj is a" in warning
    assert "Standardized" in warning


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized() -> Decoder:
    model = Decoder()
    parametrize.register_parametrization(model.lm_head, "weight", Doubled())
    return model


def stacked_unevenly() -> Decoder:
    """Queries of 4 heads with keys and values of 2."""
    model = Decoder(layers=1)
    attention = model.model.layers[0].self_attn
    attention.qkv_proj = nn.Linear(32, 64)
    for name in ("q_proj", "k_proj", "v_proj"):
        delattr(attention, name)
    return model


STACKED = {
    name: style
    for name, style in Decoder().tp_plan.items()
    if not name.endswith(("q_proj", "k_proj", "v_proj"))
}
BEFORE_ANY_RANK: dict[str, tuple[Callable[[], nn.Module], dict[str, str] | None, str]] = {
    "a weight that is computed": (parametrized, None, "needs an nn.Linear with a weight"),
    "a weight without a shape": (
        lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)),
        {"0": "colwise", "1": "rowwise"},
        "has no shape yet",
    ),
    "a parameter beside layers of the model itself": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 8)),
        {"0": "colwise", "2": "rowwise"},
        "The module 1 stands beside colwise layers",
    ),
    "stacked unevenly": (
        stacked_unevenly,
        {**STACKED, "model.layers.*.self_attn.qkv_proj": "packed_colwise"},
        "not of equal size",
    ),
}


@pytest.mark.parametrize("name", BEFORE_ANY_RANK)
def test_it_is_refused_before_any_rank_exists(name: str) -> None:
    make, plan, message = BEFORE_ANY_RANK[name]
    with pytest.raises(PlanError, match=message):
        check_plan(make(), plan, tensor=2)
