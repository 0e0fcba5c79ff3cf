"""Names of the FP8 and QAT recipes, and what they stand for; needs no torchao."""

from __future__ import annotations

from dataclasses import dataclass

FP8_RECIPES: dict[str, str] = {
    "tensorwise": "one scale for each tensor; the fastest",
    "rowwise": "one scale for each row, e4m3 everywhere, scales are powers of two; more exact",
    "rowwise_with_gw_hp": "like rowwise, but the weights' gradients are not rounded to FP8; the most exact",
}
"""FP8 recipes of torchao: name and what it does."""


@dataclass(frozen=True)
class QATRecipe:
    """What quantization-aware training prepares for.

    Attributes:
        description: One line for people.
        weight_bits: Size of a quantized weight.
        group_size: Weights along the input that share a scale; None: each output row has one scale.
        quantizes_activations: Whether each token's activations are rounded to int8, by their own range.
    """

    description: str
    weight_bits: int
    group_size: int | None
    quantizes_activations: bool


QAT_RECIPES: dict[str, QATRecipe] = {
    "int8-dynamic-act-int4-weight": QATRecipe(
        "int4 weights in groups of 32, activations int8 for each token as they come", 4, 32, True
    ),
    "int8-dynamic-act-int8-weight": QATRecipe(
        "int8 weights with one scale a row, activations int8 for each token as they come", 8, None, True
    ),
    "int4-weight-only": QATRecipe("int4 weights in groups of 32, activations untouched", 4, 32, False),
    "int8-weight-only": QATRecipe("int8 weights with one scale a row, activations untouched", 8, None, False),
}
"""QAT recipes: those that torchao 0.18 both prepares and converts on any device, CPU included."""
