"""Finding the blocks of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_core.errors import ConfigurationError
from trainer_core.model import find_blocks


def names(model: nn.Module, path: str | None = None) -> list[str]:
    return [name for name, _ in find_blocks(model, path, needed_by="activation_checkpointing")]


class Nested(nn.Module):
    """Layers with experts inside, beside other containers, as a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        experts = [nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(3)]
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(5))
        self.body = nn.ModuleDict({"layers": nn.ModuleDict({str(k): e for k, e in enumerate(experts)})})
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_found_blocks_are_those_with_most_parameters(decoder: type[nn.Module]) -> None:
    assert names(decoder()) == [f"layers.{k}" for k in range(4)]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ["0", "1"]


def test_outer_container_wins_over_what_is_inside_its_blocks() -> None:
    model = Nested()
    model.body = model.body["layers"]
    assert names(model) == ["body.0", "body.1", "body.2"]


def test_blocks_by_path() -> None:
    model = Nested()
    assert names(model, "body.layers") == ["body.layers.0", "body.layers.1", "body.layers.2"]
    assert [module for _, module in find_blocks(model, "norms", needed_by="x")] == list(model.norms)


def test_a_block_that_is_used_twice_is_found_once() -> None:
    model = nn.Module()
    shared = nn.Linear(3, 3)
    model.layers = nn.ModuleList([shared, nn.Linear(3, 3), shared])
    assert names(model) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("path", "rule", "nearest"),
    [
        ("body.layer", "is not the name of a module", "body.layers"),
        ("body.layers.0.weight", "is not the name of a module", "body.layers"),
        ("body.layers.0.0", "is a Linear", "body.layers"),
    ],
)
def test_wrong_path_names_the_nearest(path: str, rule: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError, match=rule) as caught:
        names(Nested(), path)
    assert caught.value.setting == "transformer_layers_path"
    assert nearest in caught.value.fix


def test_a_container_without_modules_is_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList()
    with pytest.raises(ConfigurationError, match="ModuleList, not a list or dict"):
        names(model, "layers")


def test_model_without_blocks_names_the_setting_that_asked() -> None:
    with pytest.raises(ConfigurationError, match=r"which torch_compile_scope needs, and Linear has no"):
        find_blocks(nn.Linear(2, 2), None, needed_by="torch_compile_scope")


def test_layers_of_several_classes_must_be_named() -> None:
    mixed = nn.Module()
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    mixed.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), experts), nn.Linear(8, 8)])
    with pytest.raises(ConfigurationError, match="several classes") as caught:
        names(mixed)
    assert "transformer_layers_path='layers'" in caught.value.fix
    assert names(mixed, "layers") == ["layers.0", "layers.1"]


def test_meta_models_are_searched_too() -> None:
    with torch.device("meta"):
        assert len(names(Nested(), None)) == 3
