"""Weights alone, as a Hugging Face directory."""

import re
from pathlib import Path

from checkpoint_core.commit import check_space, clean_leftovers, create_staging, discard
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import sync_file
from checkpoint_core.hf_layout import MODEL_STEM
from checkpoint_core.manifest import MANIFEST_NAME
from checkpoint_core.saving import Preprocessor, save_preprocessor
from checkpoint_core.storage import capture
from checkpoint_core.weights import ModelState

_WEIGHTS = re.compile(
    r"model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors"
    r"|pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?"
)


def export_model(
    model: ModelState,
    output_dir: Path,
    *,
    overwrite: bool,
    max_shard_size: int,
    preprocessor: Preprocessor | None,
) -> None:
    """Write weights, configuration and preprocessor. Called by one rank.

    Everything is written aside first; then each file takes its place by one rename, the index last.

    Args:
        model: The model.
        output_dir: The directory; made if needed. Other files in it stay.
        overwrite: Replace weights that are there.
        max_shard_size: Bytes of tensor data per file.
        preprocessor: The tokenizer or processor.

    Raises:
        CheckpointError: Weights are there already, or the directory is a checkpoint.
    """
    existing = _existing_weights(output_dir)
    if (output_dir / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{output_dir} is a checkpoint, which must not change; choose another directory"
        )
    if existing and not overwrite:
        raise CheckpointError(
            f"{output_dir / existing[0]} exists; pass overwrite_output_dir=True to replace the weights, or "
            "choose another directory"
        )
    captured = capture(model, MODEL_STEM, max_shard_size)
    clean_leftovers(output_dir)
    check_space(output_dir, captured.size)
    staging = create_staging(output_dir, 0)
    try:
        if preprocessor is not None:
            save_preprocessor(preprocessor, staging)
        captured.write(staging)
        written = sorted(
            (path.relative_to(staging) for path in staging.rglob("*") if path.is_file()), key=_order
        )
        for name in written:
            (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(output_dir / name)
    finally:
        discard(staging)
    for stale in set(existing) - {str(name) for name in written}:
        (output_dir / stale).unlink()
    sync_file(output_dir)


def _existing_weights(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if _WEIGHTS.fullmatch(path.name))


def _order(name: Path) -> tuple[bool, str]:
    return name.name.endswith(".index.json"), str(name)
