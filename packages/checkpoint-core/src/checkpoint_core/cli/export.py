"""``export``: the weights of a checkpoint as a Hugging Face directory, streamed."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from checkpoint_core.cli.cast import cast_bytes, cast_config, cast_spec
from checkpoint_core.cli.console import Progress, size_text
from checkpoint_core.cli.contents import other_files, sections
from checkpoint_core.cli.stored import StoredTensor
from checkpoint_core.cli.survey import find_damage, open_checkpoint
from checkpoint_core.directory.commit import check_space, clean_leftovers, create_staging, discard
from checkpoint_core.directory.lease import DirectoryLease
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.export_target import check_export_target, place_files
from checkpoint_core.saving import METRICS_NAME
from checkpoint_core.state.capture import WEIGHTS_FORMAT
from checkpoint_core.storage.checksum import PartialDigest
from checkpoint_core.storage.files import (
    json_bytes,
    read_json,
    sync_descriptor,
    sync_file,
    write_at,
    write_bytes,
)
from checkpoint_core.storage.hf_layout import MODEL_STEM, divide_weights, index_bytes, shard_metadata
from checkpoint_core.storage.layout import FileLayout, plan_file
from checkpoint_core.storage.tensor_files import create_tensor_file

_CONFIG_NAME = "config.json"
_DTYPES: Mapping[str, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


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
    specs = {name: cast_spec(tensor.spec, target) for name, tensor in tensors.items()}
    shards = divide_weights(specs, MODEL_STEM, max_shard_size)
    ties = manifest.tied_weights.get(key, {})
    layouts = {name: plan_file(part, shard_metadata(part, ties)) for name, part in shards.items()}
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
            if len(shards) > 1:
                write_bytes(staging / f"{MODEL_STEM}.safetensors.index.json", index_bytes(shards))
            place_files(staging, out)
        finally:
            discard(staging)
    print(f"{out}: {len(tensors)} tensors, {size_text(total)}, {len(shards)} file(s), dtype {dtype}")
    return 0


def _weights_key(checkpoint: Path, manifest: Manifest) -> str:
    keys = [record.key for record in manifest.components if record.format == WEIGHTS_FORMAT]
    if MODEL_STEM in keys:
        return MODEL_STEM
    if len(keys) == 1:
        return keys[0]
    raise CheckpointError(
        f"{checkpoint} has no component {MODEL_STEM!r} with weights to export; components with weights: "
        f"{', '.join(keys) or 'none'}. Save the model as a ModelState under that key"
    )


def _verify(checkpoint: Path, manifest: Manifest, key: str, companions: list[str]) -> None:
    weights = [name for s in sections(checkpoint, manifest) if s.record.key == key for name in s.files]
    names = [*weights, *companions]
    with Progress("verifying", sum(manifest.files[name].size for name in names)) as progress:
        for name in names:
            if (checkpoint / name).exists():
                if problem := find_damage(checkpoint, name, manifest.files[name], progress):
                    raise CheckpointError(
                        f"{checkpoint} is damaged: {problem}. Restore the file or export another checkpoint"
                    )
            elif name in weights:
                raise CheckpointError(
                    f"{checkpoint / name} was deleted, so there are no whole weights to export; restore the "
                    "file or export another checkpoint"
                )


def _weights(checkpoint: Path, manifest: Manifest, key: str) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for section in sections(checkpoint, manifest):
        if section.record.key == key:
            tensors = section.tensors()
            if twice := sorted(set(found) & set(tensors)):
                raise CheckpointError(
                    f"{checkpoint}: component {key!r} is stored {section.record.pattern}, and several copies "
                    f"hold {twice[0]}, so there is no one model to export; load it with CheckpointManager"
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
                data = cast_bytes(tensors[name], raw, place.spec.dtype)
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
            write_bytes(copy, json_bytes(cast_config(config, target)))
        else:
            shutil.copyfile(source, copy)
            sync_file(copy)
