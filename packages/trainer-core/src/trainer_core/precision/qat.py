"""Quantization-aware training through torchao: train with rounded weights, quantize them, save the result."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from checkpoint_core import load_model_weights
from dist_env import get_logger

from ..arguments.choices import QAT_RECIPES, QATRecipe
from ..errors import ConfigurationError, DataError, stopped
from .layers import (
    ConversionReport,
    LayerRule,
    check_exclusive,
    choose_layers,
    output_layer,
    refuse_converted,
    torchao_versions,
)

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization.granularity import Granularity
    from torchao.quantization.qat.linear import FakeQuantizedLinear

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
        rule, fix = (
            "is not a recipe for quantization-aware training",
            f"choose one of {', '.join(QAT_RECIPES)}",
        )
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
            f"cannot prepare any linear layer ({reasons or 'the model has none'})",
            "choose another recipe, or leave qat_recipe out",
        )
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

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
    from torchao import quantization

    dtype: torch.dtype = getattr(torch, f"int{recipe.weight_bits}")
    if recipe.quantizes_activations:
        return quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=dtype, weight_granularity=_granularity(recipe)
        )
    return quantization.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=_granularity(recipe))


def _granularity(recipe: QATRecipe) -> Granularity:
    from torchao.quantization import PerAxis, PerGroup

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
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

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
            return f"input size {layer.in_features} is not a multiple of the group size {recipe.group_size}"
        return None

    return rule


def _untouched_random_state(device: torch.device) -> AbstractContextManager[None]:
    """torchao draws weights that are thrown away; the run's random numbers must not depend on that."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _is_prepared(module: nn.Module) -> bool:
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    return isinstance(module, FakeQuantizedLinear)


def _check_prepared(model: nn.Module, name: str, recipe: QATRecipe) -> None:
    prepared = [(at, module) for at, module in model.named_modules() if _is_prepared(module)]
    if not prepared:
        rule = f"needs a model that was prepared for it, but this {type(model).__name__} was not"
        raise ConfigurationError("qat_recipe", name, rule, "call prepare_qat before the training")
    for at, module in prepared:
        if not _fits(module, recipe):
            rule = f"is not the recipe that layer {at!r} was trained with"
            raise ConfigurationError("qat_recipe", name, rule, "name the recipe of the training")
    for at, module in model.named_modules():
        if "forward" in vars(module):
            # Such a function may hold the original layer, and would run it in the copy.
            raise ConfigurationError(
                "qat_recipe",
                name,
                f"cannot be exported, because the forward method of module {at!r} was replaced (activation "
                "checkpointing does so)",
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


WEIGHTS_FILE = "model.safetensors"
DESCRIPTION_FILE = "quantization.json"
_FORMAT = 1


def export_qat(model: nn.Module, recipe: str, output_dir: str | Path) -> Path:
    """Quantize a prepared and trained model and write it down.

    The directory holds `model.safetensors`, in torchao's convention for quantized tensors (which Hugging Face
    transformers follows too), and `quantization.json`: recipe, tied weights and versions. It appears whole or
    not at all.

    Args:
        model: What `prepare_qat` prepared, trained; stays as it is.
        recipe: The recipe of the training.
        output_dir: New or empty directory.

    Returns:
        The directory.

    Raises:
        ConfigurationError: If the directory is not empty, or `convert_qat` refuses the model.
    """
    target = _free_directory(output_dir)
    deployable = convert_qat(model, recipe)
    return _write(deployable, recipe, target)


def export_qat_checkpoint(
    checkpoint: str | Path, recipe: str, output_dir: str | Path, model_init: Callable[[], nn.Module]
) -> Path:
    """Quantize a checkpoint of a QAT run and write the result down; see `export_qat`.

    Args:
        checkpoint: Directory of a checkpoint, or of a model in the Hugging Face layout.
        recipe: The `qat_recipe` of the training.
        output_dir: New or empty directory.
        model_init: Makes the model whose weights the checkpoint holds.

    Raises:
        ConfigurationError: If the directory is not empty, or the recipe does not fit the model.
        checkpoint_core.CheckpointError: If the weights are missing, damaged or of another model.
    """
    known_recipe(recipe)
    _free_directory(output_dir)
    model = model_init()
    load_model_weights(model, checkpoint)
    prepare_model(model, recipe, torch.device("cpu"))
    return export_qat(model, recipe, output_dir)


def load_quantized(directory: str | Path, model_init: Callable[[], nn.Module]) -> nn.Module:
    """Load what `export_qat` wrote.

    Args:
        directory: The directory.
        model_init: Makes the model, with ordinary layers; called on the host.

    Returns:
        The quantized model for inference, on the host, in eval mode.

    Raises:
        ConfigurationError: If torchao is missing.
        DataError: If the directory holds no such artifact, or one that does not fit the model.
    """
    path = Path(directory) / WEIGHTS_FILE
    description = _read_description(Path(directory) / DESCRIPTION_FILE)
    torchao_versions("qat_recipe", description.recipe)
    state = _read_tensors(path)
    model = model_init()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # One Parameter for all names of a tied weight, so that they stay one.
    full = {name: _as_parameter(t) if name in parameters else t for name, t in state.items()}
    try:
        full |= {alias: full[name] for alias, name in description.tied.items()}
        model.load_state_dict(full, strict=True, assign=True)
    except (KeyError, RuntimeError) as error:
        raise DataError(stopped(f"{path} does not fit the {type(model).__name__}: {error}")) from error
    return model.requires_grad_(False).eval()


@dataclass(frozen=True)
class _Description:
    recipe: str
    tied: dict[str, str]


def _read_description(path: Path) -> _Description:
    try:
        found = json.loads(path.read_text())
        if found["format"] != _FORMAT:
            raise DataError(f"{path} has format {found['format']!r}, but this version reads {_FORMAT}.")
        return _Description(str(found["recipe"]), {str(a): str(n) for a, n in found["tied"].items()})
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            stopped(f"{path} describes no quantized model: {type(error).__name__}: {error}")
        ) from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open
    from torchao.prototype.safetensors import safetensors_support

    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        # Of classes that it does not list, torchao makes no object.
        state, rest = safetensors_support.unflatten_tensor_state_dict(stored, metadata)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(stopped(f"{path} cannot be read: {type(error).__name__}: {error}")) from error
    return {**state, **rest}


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _free_directory(output_dir: str | Path) -> Path:
    path = Path(output_dir).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(
            "output_dir", str(output_dir), "exists and is not an empty directory", "choose another one"
        )
    return path


def _write(model: nn.Module, recipe: str, target: Path) -> Path:
    from safetensors.torch import save_file

    tensors, tied = _tensors_of(model)
    flat, metadata = _flatten(tensors)
    versions = torchao_versions("qat_recipe", recipe)
    description = {"format": _FORMAT, "recipe": recipe, "tied": tied, "made_with": versions}
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        staging.chmod(0o755)  # mkdtemp makes it private
        save_file(flat, staging / WEIGHTS_FILE, metadata=metadata)
        (staging / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2) + "\n")
        staging.replace(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return target


def _tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, on the host; and the further names of tied ones."""
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor.detach().cpu()
    return tensors, tied


def _flatten(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors and a header, in torchao's convention, which knows only names with a dot."""
    from torchao.prototype.safetensors import safetensors_support

    dotted = {name: tensor for name, tensor in tensors.items() if "." in name}
    flat, metadata = safetensors_support.flatten_tensor_state_dict(dotted)
    plain = {**flat, **{name: tensor for name, tensor in tensors.items() if "." not in name}}
    # Views of one storage are written one by one.
    return {name: tensor.contiguous().clone() for name, tensor in plain.items()}, metadata
