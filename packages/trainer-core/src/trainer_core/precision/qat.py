"""Quantization-aware training through torchao: train with rounded weights, then quantize them for good."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn

from dist_env import get_logger

from ..errors import ConfigurationError
from .exclusions import check_exclusive, refuse_converted, torchao_versions
from .layers import LayerRule, choose_layers, output_layer
from .recipes import QAT_RECIPES, QATRecipe
from .report import ConversionReport

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from torchao.quantization.granularity import Granularity  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from torchao.quantization.qat.linear import FakeQuantizedLinear  # type: ignore[import-untyped,import-not-found,unused-ignore]

    from ..arguments import BaseTrainingArguments

logger = get_logger(__name__)


def prepare_qat(model: nn.Module, args: BaseTrainingArguments, device: torch.device) -> ConversionReport:
    """Let the eligible linear layers of a model round like the recipe, in place.

    Weights stay what they are, in their dtype and under their names; only the products see rounded ones. So a
    checkpoint of the training holds an ordinary model.

    Eligible are plain `nn.Linear` whose input size the recipe's groups divide, that are not the output layer
    and share their weight with no other module. The report is logged.

    Args:
        model: The model, with ordinary layers; with or without storage.
        args: `qat_recipe`.
        device: Where the model will compute; its random state is left as it is.

    Returns:
        What was prepared and what was not.

    Raises:
        ConfigurationError: If the recipe is unknown, torchao is missing, no layer is eligible, or the model
            was converted before.
    """
    check_exclusive(args)
    report = prepare_model(model, args.qat_recipe, device)
    logger.info("%s", report)
    return report


def known_recipe(name: str | None) -> QATRecipe:
    """The recipe of a name.

    Raises:
        ConfigurationError: If there is none.
    """
    if name not in QAT_RECIPES:
        rule, fix = "is no recipe for quantization-aware training", f"choose of {', '.join(QAT_RECIPES)}"
        raise ConfigurationError("qat_recipe", name, rule, fix)
    return QAT_RECIPES[name]


def prepare_model(model: nn.Module, name: str | None, device: torch.device) -> ConversionReport:
    """What `prepare_qat` does, by the name of a recipe and without a word in the log."""
    recipe = known_recipe(name)
    versions = torchao_versions("qat_recipe", name)
    refuse_converted(model, "qat_recipe", name)
    choice = choose_layers(model, _layer_rule(model, recipe))
    if not choice.chosen:
        reasons = "; ".join(f"{len(names)} {why}" for why, names in choice.left_alone.items())
        raise ConfigurationError(
            "qat_recipe",
            name,
            f"no linear layer can be prepared ({reasons or 'the model has none'})",
            "choose another recipe, or leave qat_recipe out",
        )
    from torchao.quantization import quantize_  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from torchao.quantization.qat import QATConfig  # type: ignore[import-untyped,import-not-found,unused-ignore]

    with _untouched_random_state(device):
        quantize_(model, QATConfig(base_config(recipe), step="prepare"), filter_fn=choice.replaces)
    choice.finish(model)
    unknown_head = "the model has no get_output_embeddings(), so its output layer is not known"
    return ConversionReport(
        what=f"QAT {name} ({recipe.description})",
        converted=tuple(choice.chosen),
        left_alone=choice.left_alone,
        converted_weights=choice.chosen_weights,
        all_weights=choice.weights,
        notes=(versions,) if output_layer(model) is not None else (versions, unknown_head),
    )


def base_config(recipe: QATRecipe) -> AOBaseConfig:
    """What torchao calls the recipe."""
    from torchao import quantization  # type: ignore[import-untyped,import-not-found,unused-ignore]

    dtype: torch.dtype = getattr(torch, f"int{recipe.weight_bits}")
    if recipe.quantizes_activations:
        return quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=dtype, weight_granularity=_granularity(recipe)
        )
    return quantization.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=_granularity(recipe))


def _granularity(recipe: QATRecipe) -> Granularity:
    from torchao.quantization import PerAxis, PerGroup  # type: ignore[import-untyped,import-not-found,unused-ignore]

    return PerAxis(0) if recipe.group_size is None else PerGroup(recipe.group_size)


def convert_qat(model: nn.Module, recipe: str) -> nn.Module:
    """Quantize a model that was prepared and trained; the given one stays as it is.

    Args:
        model: What `prepare_qat` prepared.
        recipe: The same name.

    Returns:
        A copy for inference on the same device: in eval mode, nothing requires gradients, quantized layers
        hold integer weights and the other parts are as trained. Each quantized weight takes one byte, also
        those of 4 bits: torchao's exchange format, which needs no kernels of its own and runs on any device.

    Raises:
        ConfigurationError: If the model was not prepared for the recipe, or has replaced forward methods.
    """
    known = known_recipe(recipe)
    torchao_versions("qat_recipe", recipe)
    _check_prepared(model, recipe, known)
    from torchao.quantization import quantize_  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from torchao.quantization.qat import QATConfig  # type: ignore[import-untyped,import-not-found,unused-ignore]

    deployable = _copy(model)
    device = next(model.parameters()).device
    with _untouched_random_state(device):
        quantize_(
            deployable,
            QATConfig(base_config(known), step="convert"),
            filter_fn=lambda module, name: _is_prepared(module),
        )
    return deployable.requires_grad_(False).eval()


def _layer_rule(model: nn.Module, recipe: QATRecipe) -> LayerRule:
    users = Counter(id(tensor) for module in model.modules() for tensor in module.parameters(recurse=False))

    def rule(name: str, layer: nn.Linear) -> str | None:
        if users[id(layer.weight)] > 1:
            return "shares its weight with another module"
        if recipe.group_size is not None and layer.in_features % recipe.group_size:
            return f"input size {layer.in_features} is no multiple of the group size {recipe.group_size}"
        return None

    return rule


def _untouched_random_state(device: torch.device) -> AbstractContextManager[None]:
    """torchao draws weights that are thrown away; the run's random numbers must not depend on that."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _is_prepared(module: nn.Module) -> bool:
    from torchao.quantization.qat.linear import FakeQuantizedLinear  # type: ignore[import-untyped,import-not-found,unused-ignore]

    return isinstance(module, FakeQuantizedLinear)


def _check_prepared(model: nn.Module, name: str, recipe: QATRecipe) -> None:
    prepared = [(at, module) for at, module in model.named_modules() if _is_prepared(module)]
    if not prepared:
        rule = f"the {type(model).__name__} was not prepared for quantization"
        raise ConfigurationError("qat_recipe", name, rule, "call prepare_qat before the training")
    for at, module in prepared:
        if not _fits(module, recipe):
            rule = f"layer {at!r} was trained for another recipe"
            raise ConfigurationError("qat_recipe", name, rule, "name the recipe of the training")
    for at, module in model.named_modules():
        if "forward" in vars(module):
            # Such a function may hold the original layer, and would run it in the copy.
            raise ConfigurationError(
                "qat_recipe",
                name,
                f"the forward method of module {at!r} was replaced (activation checkpointing does so)",
                "export from a checkpoint, with a fresh model",
            )


def _fits(layer: FakeQuantizedLinear, recipe: QATRecipe) -> bool:
    weights = getattr(layer.weight_fake_quantizer, "config", None)
    return (
        (layer.activation_fake_quantizer is not None) == recipe.quantizes_activations
        and getattr(weights, "dtype", None) == getattr(torch, f"int{recipe.weight_bits}")
        and getattr(weights, "granularity", None) == _granularity(recipe)
    )


def _copy(model: nn.Module) -> nn.Module:
    """A copy that shares only the weights which quantization replaces."""
    shared: dict[int, object] = {}
    for module in model.modules():
        if not _is_prepared(module):
            continue
        shared[id(module.weight)] = module.weight
        for quantizer in (module.weight_fake_quantizer, module.activation_fake_quantizer):
            for value in vars(quantizer).values() if quantizer is not None else ():
                # Scales of the last step belong to its graph, which cannot be copied.
                if isinstance(value, torch.Tensor):
                    shared[id(value)] = value.detach()
    return copy.deepcopy(model, shared)
