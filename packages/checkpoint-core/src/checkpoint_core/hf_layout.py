"""Weights as a Hugging Face directory: safetensors shards, an index above a size limit, ``config.json``."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from checkpoint_core.encoding import TAG, EncodedState, encode_state
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import json_bytes, read_json, read_safetensors, tensor_bytes
from checkpoint_core.names import unwrap
from checkpoint_core.weights import ModelState

FORMAT_ENTRY = "format"
MODEL_STEM = "model"


@dataclass(frozen=True)
class WeightFiles:
    """Weights divided into files."""

    shards: Mapping[str, Mapping[str, torch.Tensor]]
    """Tensors by name, by file name."""
    tied: Mapping[str, str]
    """Name of the stored tensor, by alias."""
    index: bytes | None
    """Content of the index, when there is more than one shard."""

    def metadata(self, shard: str) -> dict[str, str]:
        """The safetensors metadata of one shard: the framework, and the aliases of its tensors."""
        aliases = {alias: name for alias, name in self.tied.items() if name in self.shards[shard]}
        return {**aliases, FORMAT_ENTRY: "pt"}


def divide_weights(state: Mapping[str, object], stem: str, max_shard_size: int) -> WeightFiles:
    """Divide weights into files of at most a size; a larger tensor gets a file for itself.

    Args:
        state: Tensors by canonical name; tied weights appear under each of their names.
        stem: Beginning of the file names.
        max_shard_size: Bytes of tensor data per file.

    Returns:
        The files, each tied weight once, under the first of its names.
    """
    encoded = encode_state(dict(state))
    parts: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in encoded.tensors.items():
        size = tensor_bytes(tensor)
        if parts[-1] and filled + size > max_shard_size:
            parts.append({})
            filled = 0
        parts[-1][name] = tensor
        filled += size
    count = len(parts)
    if count == 1:
        return WeightFiles({f"{stem}.safetensors": parts[0]}, _aliases(encoded), None)
    shards = {f"{stem}-{i:05d}-of-{count:05d}.safetensors": part for i, part in enumerate(parts, 1)}
    total = sum(tensor_bytes(tensor) for tensor in encoded.tensors.values())
    places = {name: shard for shard, part in shards.items() for name in part}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    return WeightFiles(shards, _aliases(encoded), json_bytes(index))


def read_weights(paths: Sequence[Path]) -> EncodedState:
    """Read weight files, with the aliases of tied weights put back.

    Args:
        paths: The shards.

    Returns:
        The weights by canonical name. The tensors are backed by the mapped files; copy them.

    Raises:
        CheckpointError: A file is damaged, or two files hold the same tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for path in paths:
        part, metadata = read_safetensors(path, copy=False)
        if twice := set(part) & set(tensors):
            raise CheckpointError(f"{path} repeats tensor {min(twice)} of another shard")
        tensors.update(part)
        aliases.update(
            {
                alias: name
                for alias, name in metadata.items()
                if alias != FORMAT_ENTRY and name in part and alias not in part
            }
        )
    document: dict[str, object] = {name: {TAG: "tensor", "name": name} for name in tensors}
    document.update({alias: {TAG: "tensor", "name": name} for alias, name in aliases.items()})
    return EncodedState(document, tensors)


def weight_files(directory: Path, stem: str = MODEL_STEM) -> list[Path]:
    """The weight files of a Hugging Face directory, by its index or as the one file.

    Args:
        directory: The directory.
        stem: Beginning of the file names.

    Returns:
        The shards.

    Raises:
        CheckpointError: No safetensors weights are there, or the index is malformed.
    """
    single = directory / f"{stem}.safetensors"
    index = directory / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        found = sorted(path.name for path in directory.glob("*.bin")) if directory.is_dir() else []
        hint = f"; it has {found[0]}, a pickle that is never read: convert it" if found else ""
        raise CheckpointError(f"{directory} holds neither {single.name} nor {index.name}{hint}")
    document = read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted({str(name) for name in places.values()})
    if unsafe := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index} points outside its directory: {unsafe[0]!r}")
    return [directory / name for name in names]


def load_model_weights(model: nn.Module, directory: str | Path) -> None:
    """Load the weights of a Hugging Face directory, or of a checkpoint, into a model.

    Args:
        model: The model; its parameters keep their dtype and device.
        directory: A directory with ``model.safetensors`` or an index and its shards.

    Raises:
        CheckpointError: The weights are missing, damaged, or do not fit the model.
    """
    read = read_weights(weight_files(Path(directory)))
    ModelState(model).load_state_dict({name: read.tensors[ref] for name, ref in _references(read).items()})


def config_bytes(model: nn.Module) -> bytes | None:
    """The content of ``config.json``.

    Args:
        model: A model whose ``config`` has ``to_dict()``, or is a dataclass or a dict.

    Returns:
        The JSON file's bytes, or None when the model has no such ``config``.

    Raises:
        CheckpointError: The configuration holds something JSON cannot hold.
    """
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        values = dict(to_dict())
        # Hugging Face's own loaders pick the class by this entry and fill it in only when they save.
        if "architectures" in values and not values["architectures"]:
            values["architectures"] = [type(inner).__name__]
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = dataclasses.asdict(config)
    elif isinstance(config, dict):
        values = config
    else:
        return None
    try:
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json cannot be written: the configuration of {type(inner).__name__} holds a value that "
            f"JSON has no form for ({error}); give it a to_dict() that returns plain values"
        ) from error


def _aliases(encoded: EncodedState) -> dict[str, str]:
    return {alias: name for alias, name in _references(encoded).items() if alias != name}


def _references(encoded: EncodedState) -> dict[str, str]:
    """Name of the stored tensor, by weight name."""
    document = encoded.document
    nodes = document.items() if isinstance(document, dict) else ()
    return {str(key): str(node["name"]) for key, node in nodes}
