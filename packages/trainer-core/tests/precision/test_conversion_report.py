"""The text about replaced layers, and which layers may be replaced at all."""

from __future__ import annotations

import pytest
from torch import nn

from trainer_core import ConfigurationError
from trainer_core.precision import ConversionReport
from trainer_core.precision.layers import choose_layers, grouped


class SpecialLinear(nn.Linear):
    """A linear layer of another class."""


class Model(nn.Module):
    """Layers of every kind that is treated differently."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16)}) for _ in range(3))
        self.special = SpecialLinear(8, 8)
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda *_: None)
        self.head = nn.Linear(16, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_names_that_differ_in_numbers_are_one() -> None:
    names = [f"model.layers.{n}.mlp.w{k}" for n in range(12) for k in (1, 2)] + ["head", "layers.0"]
    assert grouped(names) == [
        "model.layers.*.mlp.w1 (12 times)",
        "model.layers.*.mlp.w2 (12 times)",
        "head",
        "layers.0",
    ]


def test_report_says_what_and_why() -> None:
    report = ConversionReport(
        what="FP8 rowwise",
        converted=("layers.0.up", "layers.1.up"),
        left_alone={"the output layer": ("head",)},
        converted_weights=300,
        all_weights=400,
        notes=("a note",),
    )
    assert report.total == 3
    assert str(report) == (
        "FP8 rowwise: 2 of 3 linear layers, 75.0% of their weights\n"
        "  converted: layers.*.up (2 times)\n"
        "  left alone, the output layer: head\n"
        "  a note"
    )


def test_every_layer_is_chosen_or_has_a_reason() -> None:
    choice = choose_layers(Model(), lambda name, layer: None, ["blocks.1"])
    assert list(choice.chosen) == ["blocks.0.up", "blocks.2.up"]
    assert choice.left_alone == {
        "excluded by 'blocks.1'": ("blocks.1.up",),
        "a SpecialLinear, whose own forward would be lost": ("special",),
        "has hooks, which would be lost": ("hooked",),
        "the output layer": ("head",),
    }
    assert choice.weights == 3 * 128 + 64 + 64 + 64


def test_the_rule_of_a_recipe_comes_last() -> None:
    choice = choose_layers(Model(), lambda name, layer: "too small" if "0" in name else None)
    assert choice.left_alone["too small"] == ("blocks.0.up",)


@pytest.mark.parametrize("pattern", ["*.up", "blocks", "blocks.*", "b*"])
def test_patterns_match_layers_and_what_holds_them(pattern: str) -> None:
    assert not choose_layers(Model(), lambda name, layer: None, [pattern]).chosen


def test_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"fp8_exclude='blocks\.0\.upp'.*names: blocks\.0\.up"):
        choose_layers(Model(), lambda name, layer: None, ["blocks.0.upp"])


def test_a_layer_with_two_names_counts_once() -> None:
    model = Model()
    model.again = model.blocks[0]["up"]
    choice = choose_layers(model, lambda name, layer: None)
    assert choice.aliases == {"again": "blocks.0.up"}
    assert list(choice.chosen) == [f"blocks.{n}.up" for n in range(3)]


def test_a_model_that_is_a_layer_is_left_alone() -> None:
    choice = choose_layers(nn.Linear(4, 4), lambda name, layer: None)
    assert choice.left_alone == {"the model itself, which cannot be replaced from within": ("",)}
