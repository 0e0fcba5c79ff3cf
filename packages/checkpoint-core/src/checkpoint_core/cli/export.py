"""``export``: the weights of a checkpoint as a Hugging Face directory, streamed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from checkpoint_core.cli.console import Progress, size_text
from checkpoint_core.cli.ls_verify import find_damage, open_checkpoint
from checkpoint_core.cli.show import StoredTensor, other_files, sections
from checkpoint_core.component_files import WEIGHTS_FORMAT
from checkpoint_core.directory.commit import check_space, clean_leftovers, create_staging, discard
from checkpoint_core.directory.lease import DirectoryLease
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.export import check_export_target, place_files
from checkpoint_core.saving import METRICS_NAME
from checkpoint_core.storage.files import (
    PartialDigest,
    json_bytes,
    read_json,
    sync_descriptor,
    sync_file,
    write_at,
    write_bytes,
)
from checkpoint_core.storage.tensor_files import (
    MODEL_STEM,
    FileLayout,
    TensorSpec,
    create_tensor_file,
    plan_weights,
)

_DTYPE_ENTRIES = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"
_FLOAT_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_CONFIG_NAME = "config.json"
_DTYPES: Mapping[str, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def _cast_spec(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """What a tensor is after the cast, which changes floating point tensors only."""
    return TensorSpec(dtype, spec.shape) if dtype is not None and spec.dtype.is_floating_point else spec


def _cast_bytes(tensor: StoredTensor, raw: bytearray, dtype: torch.dtype) -> bytearray:
    """Cast a piece of a stored tensor, from and to its bytes in a file.

    Raises:
        CheckpointError: A value is too large for the new dtype.
    """
    source = tensor.spec.dtype
    if dtype == source:
        return raw
    values = torch.frombuffer(raw, dtype=source)
    result = bytearray(values.numel() * dtype.itemsize)
    cast = torch.frombuffer(result, dtype=dtype)
    cast.copy_(values)
    overflows = torch.finfo(source).max > torch.finfo(dtype).max
    if overflows and bool((cast.isinf() & ~values.isinf()).any()):
        raise CheckpointError(
            f"tensor {tensor.name} of {tensor.path} has values that {dtype} cannot hold, whose largest is "
            f"{torch.finfo(dtype).max:g}. Export with --dtype keep, bf16 or fp32."
        )
    return result


def _cast_config(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Name the new dtype in a model's configuration, where that has an entry for a floating point dtype.

    Parts of the model may have a ``..._config`` in it.
    """
    result = dict(config)
    for key, value in config.items():
        if key in _DTYPE_ENTRIES and _names_float(value):
            result[key] = str(dtype).removeprefix("torch.")
        elif isinstance(value, dict) and key.endswith("_config") and key != _QUANTIZATION:
            result[key] = _cast_config(value, dtype)
    return result


def _names_float(value: object) -> bool:
    """Whether an entry names a floating point dtype, or leaves it open."""
    return value is None or (isinstance(value, str) and value.removeprefix("torch.") in _FLOAT_NAMES)


def export(checkpoint: Path, out: Path, *, dtype: str, max_shard_size: int, overwrite: bool) -> int:
    """Write a Hugging Face directory from a checkpoint, a piece of a tensor at a time.

    Everything is written aside first; then each file takes its place by one rename, the index last.

    Args:
        checkpoint: The checkpoint.
        out: The directory; made if needed. Other files in it stay.
        dtype: ``keep``, or what floating point tensors become: ``bf16``, ``fp16`` or ``fp32``.
        max_shard_size: Bytes of tensor data per file.
        overwrite: Replace weights that are there.

    Returns:
        0.

    Raises:
        CheckpointError: The checkpoint is damaged or has no weights, ``out`` is not free, there is no space,
            or a value does not fit the dtype.
    """
    manifest = open_checkpoint(checkpoint)
    check_export_target(out, overwrite=overwrite, setting="--overwrite")
    key = _weights_key(checkpoint, manifest)
    companions = [name for name in other_files(manifest) if name != METRICS_NAME]
    _verify(checkpoint, manifest, key, companions)
    target = _DTYPES[dtype]
    tensors = _weights(checkpoint, manifest, key)
    specs = {name: _cast_spec(tensor.spec, target) for name, tensor in tensors.items()}
    ties = manifest.tied_weights.get(key, {})
    layouts, index = plan_weights(specs, MODEL_STEM, max_shard_size, ties)
    total = sum(layout.size for layout in layouts.values())
    # Two exports into one directory would leave the files of both, and who came second would replace what it
    # was not told to replace.
    with DirectoryLease(out):
        check_export_target(out, overwrite=overwrite, setting="--overwrite")
        clean_leftovers(out)
        check_space(out, total)
        staging = create_staging(out, 0)
        try:
            _copy_companions(checkpoint, companions, staging, target)
            with Progress(f"exporting {checkpoint.name}", total) as progress:
                for name, layout in layouts.items():
                    _write(staging / name, layout, tensors, progress)
            for name, content in index.items():
                write_bytes(staging / name, content)
            place_files(staging, out)
        finally:
            discard(staging)
    print(f"{out}: {len(tensors)} tensors, {size_text(total)}, {len(layouts)} file(s), dtype {dtype}")
    return 0


def _weights_key(checkpoint: Path, manifest: Manifest) -> str:
    keys = [record.key for record in manifest.components if record.format == WEIGHTS_FORMAT]
    if MODEL_STEM in keys:
        return MODEL_STEM
    if len(keys) == 1:
        return keys[0]
    raise CheckpointError(
        f"{checkpoint} has no component {MODEL_STEM!r} with weights to export. Components with weights: "
        f"{', '.join(keys) or 'none'}. Save the model as a ModelState under that key."
    )


def _verify(checkpoint: Path, manifest: Manifest, key: str, companions: list[str]) -> None:
    weights = [name for s in sections(checkpoint, manifest) if s.record.key == key for name in s.files]
    names = [*weights, *companions]
    with Progress("verifying", sum(manifest.files[name].size for name in names)) as progress:
        for name in names:
            if (checkpoint / name).exists():
                if problem := find_damage(checkpoint, name, manifest.files[name], progress):
                    raise CheckpointError(
                        f"{checkpoint} is damaged: {problem}. Restore the file or export another checkpoint."
                    )
            elif name in weights:
                raise CheckpointError(
                    f"{checkpoint / name} was deleted, so there are no whole weights to export. Restore the "
                    "file or export another checkpoint."
                )


def _weights(checkpoint: Path, manifest: Manifest, key: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for section in sections(checkpoint, manifest):
        if section.record.key == key:
            tensors = section.tensors()
            if twice := sorted(set(found) & set(tensors)):
                raise CheckpointError(
                    f"{checkpoint}: component {key!r} is stored {section.record.pattern}, and several "
                    f"copies hold {twice[0]}, so there is no one model to export. Load it with "
                    "CheckpointManager."
                )
            found.update(tensors)
    return found


def _write(path: Path, layout: FileLayout, tensors: Mapping[str, StoredTensor], progress: Progress) -> None:
    create_tensor_file(path, layout)
    digest = PartialDigest()
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for name, place in layout.places.items():
            offset = place.start
            for raw in tensors[name].raw_pieces():
                data = _cast_bytes(tensors[name], raw, place.spec.dtype)
                write_at(descriptor, memoryview(data), offset, path, digest)
                offset += len(data)
                progress.advance(len(data))
                progress.show(name)
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def _copy_companions(checkpoint: Path, names: list[str], staging: Path, target: torch.dtype | None) -> None:
    for name in names:
        source, copy = checkpoint / name, staging / name
        if not source.is_file():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        config = read_json(source) if name == _CONFIG_NAME and target is not None else None
        if target is not None and isinstance(config, dict):
            write_bytes(copy, json_bytes(_cast_config(config, target)))
        else:
            shutil.copyfile(source, copy)
            sync_file(copy)
