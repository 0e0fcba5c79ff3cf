"""Weights of divided experts are shared out among the ranks that hold the same ones, evenly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dist_env import fake_job
from trainer_core import ConfigurationError
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer, FSDP2TrainingArguments
from trainer_fsdp2.full_sharding import _dimension_of


class Experts(nn.Module):
    """Called as those of transformers are."""

    def __init__(self, count: int, wide: int, width: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, wide, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        chosen = self.up[top_k_index.squeeze(-1)]
        return torch.einsum("tw,thw->tw", hidden_states, chosen) * top_k_weights


class Layer(nn.Module):
    def __init__(self, experts: nn.Module, width: int) -> None:
        super().__init__()
        self.experts = experts
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        first = torch.zeros(len(tokens), 1, dtype=torch.int64, device=x.device)
        chosen = self.experts(tokens, first, torch.ones_like(first, dtype=torch.float32))
        return x + self.out(chosen.to(x.dtype)).view(x.shape)


class Model(nn.Module):
    def __init__(self, count: int = 4, wide: int = 6, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(Experts(count, wide, width), width) for _ in range(2))
        self.head = nn.Linear(width, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trainer_of(path: Path, ranks: int, mesh: str, model: nn.Module, **settings: object) -> FSDP2Trainer:
    rows = torch.randint(16, (64, 8), generator=torch.Generator().manual_seed(0))
    args = FSDP2TrainingArguments(
        output_dir=str(path),
        mesh=mesh,
        max_steps=2,
        use_cpu=True,
        **settings,  # type: ignore[arg-type]
    )
    with fake_job(ranks) as env:
        trainer = FSDP2Trainer(
            args,
            model_init=lambda: model,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            distributed_env=env,
            callbacks=[],
        )
        trainer.dry_run()
        return trainer


@pytest.mark.parametrize(
    ("shape", "mesh", "dimensions"),
    [
        ((4, 6, 8), "shard=4,ep=2", {0}),
        ((2, 6, 8), "shard=4,ep=2", {0, 1}),  # one expert for each rank, so that each of them is divided
        ((2, 5, 8), "shard=4,ep=2", {0, 2}),
        ((4, 6, 8), "tp=4,ep=2", {0}),
        ((2, 6, 8), "dp=2,shard=2,ep=2", {0}),
    ],
)
def test_the_first_dimension_that_the_ranks_divide(
    shape: tuple[int, int, int],
    mesh: str,
    dimensions: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[nn.Module] = []
    model = Model(*shape)
    model.tp_plan = {"head": "colwise_gather_output"}
    monkeypatch.setattr(
        "trainer_core.distributed.transforms.BuiltModel.attach", lambda built, _: seen.append(built.model)
    )
    trainer_of(tmp_path, 4, mesh, model)
    weight = seen[0].layers[0].experts.up  # type: ignore[index, union-attr]
    assert isinstance(weight, DTensor)
    assert {placement.dim for placement in weight.placements if hasattr(placement, "dim")} == dimensions
    whole = shape[0] * shape[1] * shape[2]
    copies = 2 if "dp" in mesh else 1
    assert weight.to_local().numel() == whole * copies // 4


def test_weights_that_nothing_divides_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"2 ranks with the same experts' cannot share out up of the shape"
    ):
        trainer_of(tmp_path, 4, "shard=4,ep=2", Model(2, 5, 7))


@pytest.mark.parametrize("count", [None, "4"])
def test_experts_that_do_not_say_how_many_they_are_are_refused(count: object) -> None:
    module = nn.Module()
    module.num_experts = count  # type: ignore[assignment]
    with pytest.raises(TypeError, match=rf"num_experts={count!r} of Module must be a whole number.* Set it"):
        _dimension_of(module, ranks=2)


@pytest.mark.parametrize(("ranks", "mesh"), [(4, "shard=4,ep=2"), (4, "shard=4,ep=4"), (6, "shard=6,ep=2")])
def test_a_number_for_gathered_weights_is_about_the_other_ones(ranks: int, mesh: str, tmp_path: Path) -> None:
    model = Model(ranks, 6, 6 if ranks == 6 else 8)
    trainer_of(tmp_path, ranks, mesh, model, fsdp2=FSDP2Arguments(reshard_after_forward=2))


def test_weights_of_the_choice_are_not_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    forward = Experts.forward

    def watched(self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not hidden_states.is_meta:  # as where FLOPs are counted
            seen.add((hidden_states.dtype, top_k_weights.dtype))
        return forward(self, hidden_states, top_k_index, top_k_weights.to(hidden_states.dtype))

    monkeypatch.setattr(Experts, "forward", watched)
    for mesh in ("shard=2", "shard=2,ep=2"):
        trainer_of(tmp_path, 2, mesh, Model(), fsdp2=FSDP2Arguments(param_dtype="bfloat16"))
        assert seen == {(torch.bfloat16, torch.float32)}, mesh


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    with pytest.raises(
        ConfigurationError, match="mesh='shard=2,ep=2' cannot be used with this model: The model"
    ):
        trainer_of(tmp_path, 2, "shard=2,ep=2", model)


def test_layers_that_are_replaced_by_others_are_refused(tmp_path: Path) -> None:
    recipe = "int8-dynamic-act-int4-weight"
    with pytest.raises(
        ConfigurationError, match=f"'{recipe}' replaces layers by others that expert parallel"
    ):
        trainer_of(tmp_path, 2, "shard=2,ep=2", Model(), qat_recipe=recipe)
