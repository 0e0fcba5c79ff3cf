"""A quantized model as files: saved without pickle, loaded into a fresh model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint_core import load_model_weights

from ..errors import ConfigurationError, DataError
from .exclusions import torchao_versions
from .qat import convert_qat, known_recipe, prepare_model

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
        raise DataError(f"{path} does not fit the {type(model).__name__}: {error}") from error
    return model.requires_grad_(False).eval()


@dataclass(frozen=True)
class _Description:
    recipe: str
    tied: dict[str, str]


def _read_description(path: Path) -> _Description:
    try:
        found = json.loads(path.read_text())
        if found["format"] != _FORMAT:
            raise DataError(f"{path} has format {found['format']!r}, and this version reads {_FORMAT}")
        return _Description(str(found["recipe"]), {str(a): str(n) for a, n in found["tied"].items()})
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} describes no quantized model: {type(error).__name__}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open
    from torchao.prototype.safetensors import safetensors_support  # type: ignore[import-untyped,import-not-found,unused-ignore]

    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        # Of classes that it does not list, torchao makes no object.
        state, rest = safetensors_support.unflatten_tensor_state_dict(stored, metadata)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return {**state, **rest}


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _free_directory(output_dir: str | Path) -> Path:
    path = Path(output_dir).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(
            "output_dir", str(output_dir), "is there and not an empty directory", "choose another"
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
    from torchao.prototype.safetensors import safetensors_support  # type: ignore[import-untyped,import-not-found,unused-ignore]

    dotted = {name: tensor for name, tensor in tensors.items() if "." in name}
    flat, metadata = safetensors_support.flatten_tensor_state_dict(dotted)
    plain = {**flat, **{name: tensor for name, tensor in tensors.items() if "." not in name}}
    # Views of one storage are written one by one.
    return {name: tensor.contiguous().clone() for name, tensor in plain.items()}, metadata
