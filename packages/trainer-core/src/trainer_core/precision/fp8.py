"""Linear layers that multiply in float8, through torchao."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from dist_env import get_logger

from ..arguments.choices import FP8_RECIPES
from ..errors import ConfigurationError
from .autocast import autocast
from .layers import (
    ConversionReport,
    LayerChoice,
    LayerRule,
    check_exclusive,
    choose_layers,
    output_layer,
    refuse_converted,
    torchao_versions,
)

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

    from ..arguments import BaseTrainingArguments

logger = get_logger(__name__)

# The forward product and the two of the backward pass are equally large; rowwise_with_gw_hp does one of them
# in the weights' own format.
_SHARE_OF_PRODUCTS = {"tensorwise": 1.0, "rowwise": 1.0, "rowwise_with_gw_hp": 2 / 3}


def convert_to_fp8(
    model: nn.Module, args: BaseTrainingArguments, device: torch.device, *, gathered: bool = False
) -> ConversionReport:
    """Replace the eligible linear layers of a model, in place; weights stay and keep their names.

    Eligible are plain `nn.Linear` whose two sizes are multiples of `fp8_dim_alignment`, that are not the
    output layer and match no pattern of `fp8_exclude`. The report is logged.

    Before that, a layer of each kind is tried: forward and backward on an input of three dimensions.

    Args:
        model: The model, with ordinary layers; with or without storage.
        args: `fp8_recipe`, `fp8_dim_alignment`, `fp8_exclude`, `fp8_emulate`, `mixed_precision` (what the
            trial runs under) and `torch_compile`.
        device: Where the model will compute.
        gathered: Whether weights will be sharded, and gathered in float8; for the recipe tensorwise.

    Returns:
        What was converted and what was not.

    Raises:
        ConfigurationError: If the recipe is unknown, the device has no float8 units, torchao is missing or
            fails in the trial, no layer is eligible, or the model was converted before.
    """
    check_exclusive(args)
    recipe = _known_recipe(args)
    versions = torchao_versions("fp8_recipe", recipe)
    _check_device(args, device)
    refuse_converted(model, "fp8_recipe", recipe)
    choice = choose_layers(model, _alignment_rule(args.fp8_dim_alignment), args.fp8_exclude)
    if not choice.chosen:
        raise _nothing_to_convert(recipe, choice)
    config = _config(args, recipe)
    _try_layers(args, recipe, config, choice, device)
    _convert(model, dataclasses.replace(config, enable_fsdp_float8_all_gather=gathered), choice)
    report = _report(model, args, recipe, choice, versions)
    logger.info("%s", report)
    if not args.torch_compile:
        logger.warning(
            "%d FP8 layers (%s) without torch_compile are slower than bf16, because scaling and rounding are "
            "not fused; set torch_compile=True",
            len(report.converted),
            recipe,
        )
    return report


def _known_recipe(args: BaseTrainingArguments) -> str:
    recipe = args.fp8_recipe
    if recipe not in FP8_RECIPES:
        rule, fix = "is not an FP8 recipe", f"choose one of {', '.join(FP8_RECIPES)}"
        raise ConfigurationError("fp8_recipe", recipe, rule, fix)
    return recipe


def _check_device(args: BaseTrainingArguments, device: torch.device) -> None:
    missing = None if args.fp8_emulate else lacks_fp8(device)
    if missing is not None:
        raise ConfigurationError(
            "fp8_recipe",
            args.fp8_recipe,
            "needs an NVIDIA GPU of compute capability 8.9 or higher, or an AMD MI300 or later, but found "
            f"{missing}",
            "use mixed_precision='bf16', or set fp8_emulate=True for a slow test without such a device",
        )


def lacks_fp8(device: torch.device) -> str | None:
    """What is there instead of float8 units; None if the device has them.

    torchao's own rules: compute capability 8.9 (Ada, Hopper and later), or gfx94x, gfx950, gfx12xx on ROCm.
    """
    if device.type != "cuda":
        return f"device {device.type!r}"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        arch = str(torch.cuda.get_device_properties(device).gcnArchName)
        return None if arch.startswith(("gfx94", "gfx95", "gfx12")) else f"{name} ({arch})"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"{name} with compute capability {major}.{minor}"


def _alignment_rule(alignment: int) -> LayerRule:
    def rule(name: str, layer: nn.Linear) -> str | None:
        if alignment and (layer.in_features % alignment or layer.out_features % alignment):
            return f"sizes {layer.in_features} to {layer.out_features} are not multiples of {alignment}"
        return None

    return rule


def _nothing_to_convert(recipe: str, choice: LayerChoice) -> ConfigurationError:
    reasons = "; ".join(f"{len(names)} {why}" for why, names in choice.left_alone.items())
    return ConfigurationError(
        "fp8_recipe",
        recipe,
        f"cannot convert any linear layer ({reasons or 'the model has none'})",
        "leave fp8_recipe out, or change fp8_dim_alignment or fp8_exclude",
    )


def _config(args: BaseTrainingArguments, recipe: str) -> Float8LinearConfig:
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=args.fp8_emulate)


def _convert(model: nn.Module, config: Float8LinearConfig, choice: LayerChoice) -> None:
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: choice.replaces(module, name)
    )
    choice.finish(model)


def _try_layers(
    args: BaseTrainingArguments,
    recipe: str,
    config: Float8LinearConfig,
    choice: LayerChoice,
    device: torch.device,
) -> None:
    """Run one small layer of each kind; what matters of the sizes is what is left over 16."""
    kinds = {
        (layer.in_features % 16, layer.out_features % 16, layer.bias is not None, layer.weight.dtype)
        for layer in choice.chosen.values()
    }
    for extra_in, extra_out, bias, dtype in sorted(kinds, key=str):
        with torch.device("meta"):  # draws no random numbers
            layer = nn.Linear(32 + extra_in, 32 + extra_out, bias=bias, dtype=dtype)
        layer.to_empty(device=device)
        try:
            finite = _trains(args, config, layer)
        except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
            raise _does_not_run(args, recipe, layer, f"{type(error).__name__}: {error}") from error
        if not finite:
            raise _does_not_run(args, recipe, layer, "the gradients are not finite")


def _trains(args: BaseTrainingArguments, config: Float8LinearConfig, layer: nn.Linear) -> bool:
    """Run an input of three dimensions forward and backward; whether the gradients are finite."""
    holder = nn.Sequential(layer)
    choice = choose_layers(holder, lambda name, layer: None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    _convert(holder, config, choice)
    ramp = torch.linspace(-1, 1, 2 * 16 * layer.in_features, device=layer.weight.device)
    inputs = ramp.view(2, 16, layer.in_features).to(layer.weight.dtype).requires_grad_()
    with torch.enable_grad():
        with autocast(args, layer.weight.device.type):
            outputs = holder(inputs)
        torch.autograd.backward(outputs.float().square().mean())
    gradients = [inputs.grad, layer.weight.grad]
    return all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


def _does_not_run(
    args: BaseTrainingArguments, recipe: str, layer: nn.Linear, error: str
) -> ConfigurationError:
    dtype = str(layer.weight.dtype).removeprefix("torch.")
    aligned = layer.in_features % 16 == layer.out_features % 16 == 0
    fix = "choose another fp8_recipe or mixed_precision"
    return ConfigurationError(
        "fp8_recipe",
        recipe,
        f"cannot train a trial layer of {layer.in_features} to {layer.out_features} with {dtype} weights "
        f"and mixed_precision={args.mixed_precision!r} on {layer.weight.device.type!r} in torchao: {error}",
        fix if aligned else f"{fix}, or set fp8_dim_alignment=16",
    )


def _report(
    model: nn.Module, args: BaseTrainingArguments, recipe: str, choice: LayerChoice, versions: str
) -> ConversionReport:
    notes = [versions]
    if args.fp8_emulate:
        notes.append("emulated: values are rounded to FP8, products run in float32")
    else:
        notes.append("rows times length of a microbatch must be a multiple of 16")
    if output_layer(model) is None:
        notes.append("the model has no get_output_embeddings(), so its output layer is not known")
    return ConversionReport(
        what=f"FP8 {recipe}",
        converted=tuple(choice.chosen),
        left_alone=choice.left_alone,
        converted_weights=choice.chosen_weights,
        all_weights=choice.weights,
        fp8_share=share_in_fp8(args, choice.chosen_weights / choice.weights),
        notes=tuple(notes),
    )


def fp8_share_of(model: nn.Module, args: BaseTrainingArguments) -> float:
    """Share of the FLOPs of a model's linear layers that run in FP8; 0 if nothing was converted."""
    if args.fp8_recipe is None:
        return 0.0
    from torchao.float8.float8_linear import Float8Linear

    sizes = [
        (layer.in_features * layer.out_features, isinstance(layer, Float8Linear))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    every = sum(size for size, _ in sizes)
    return share_in_fp8(args, sum(size for size, is_fp8 in sizes if is_fp8) / every) if every else 0.0


def share_in_fp8(args: BaseTrainingArguments, weight_share: float) -> float:
    """Share of the FLOPs of linear layers that run in FP8, when this share of their weights was converted."""
    products = _SHARE_OF_PRODUCTS.get(args.fp8_recipe or "", 0.0)
    return 0.0 if args.fp8_emulate else weight_share * products
