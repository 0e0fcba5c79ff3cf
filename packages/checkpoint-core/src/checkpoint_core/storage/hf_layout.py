"""Weights as a Hugging Face directory: safetensors shards, an index above a size limit, ``config.json``."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import json_bytes, read_json
from checkpoint_core.storage.layout import FileLayout, TensorSpec

FORMAT_ENTRY = "format"
MODEL_STEM = "model"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def divide_weights(
    specs: Mapping[str, TensorSpec], stem: str, max_shard_size: int
) -> dict[str, dict[str, TensorSpec]]:
    """Divide weights into files of at most a size; a larger tensor gets a file for itself.

    Args:
        specs: The tensors by canonical name, each tied weight once.
        stem: Beginning of the file names.
        max_shard_size: Bytes of tensor data per file.

    Returns:
        The tensors of each file, by file name.
    """
    parts: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in specs.items():
        if parts[-1] and filled + spec.nbytes > max_shard_size:
            parts.append({})
            filled = 0
        parts[-1][name] = spec
        filled += spec.nbytes
    count = len(parts)
    if count == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{i:05d}-of-{count:05d}.safetensors": part for i, part in enumerate(parts, 1)}


def shard_metadata(names: Iterable[str], tied: Mapping[str, str]) -> dict[str, str]:
    """The safetensors metadata of one file of weights: the framework, and the aliases of its tensors.

    Args:
        names: The tensors of the file.
        tied: Name of the stored tensor, by alias.

    Returns:
        The metadata.
    """
    stored = set(names)
    return {**{alias: name for alias, name in tied.items() if name in stored}, FORMAT_ENTRY: "pt"}


def index_bytes(shards: Mapping[str, Mapping[str, TensorSpec]]) -> bytes:
    """The content of the index of several files of weights.

    Args:
        shards: The tensors of each file, by file name.

    Returns:
        The JSON file's bytes.
    """
    total = sum(spec.nbytes for part in shards.values() for spec in part.values())
    places = {name: shard for shard, part in shards.items() for name in part}
    return json_bytes({"metadata": {"total_size": total}, "weight_map": places})


def stored_aliases(layout: FileLayout) -> dict[str, str]:
    """Name of the stored tensor, by alias, as a file of weights tells it.

    Args:
        layout: The file's layout.

    Returns:
        The aliases; other metadata is left out.
    """
    return {
        alias: name
        for alias, name in layout.metadata.items()
        if alias != FORMAT_ENTRY and name in layout.places and alias not in layout.places
    }


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
        found = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        pickles = [name for name in found if Path(name).suffix in _PICKLE_SUFFIXES]
        remedy = "name a directory that has one of them"
        if pickles:
            remedy = f"it has {pickles[0]}, a pickle that is never read: convert it to safetensors"
        raise CheckpointError(f"{directory} holds neither {single.name} nor {index.name}; {remedy}")
    document = read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if Path(name).name != name or name in ("", "..") or "\x00" in name:
            raise CheckpointError(f"{index} points outside its directory: {name!r}; restore the index")
        if not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names {name!r}, which is not a safetensors file; other formats are never read, so "
                "convert it"
            )
        if not (directory / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not there; restore that file")
    return [directory / name for name in names]
