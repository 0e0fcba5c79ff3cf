"""The directory that weights are exported to: which are safe, and how files take their places there."""

import re
from pathlib import Path

from checkpoint_core.directory.manifest import MANIFEST_NAME
from checkpoint_core.errors import CheckpointError
from checkpoint_core.storage.files import sync_file

_WEIGHTS = re.compile(
    r"model\.safetensors(\.index\.json)?|model-\d+-of-\d+\.safetensors"
    r"|pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?"
)


def check_export_target(out: Path, *, overwrite: bool, setting: str) -> None:
    """Refuse to write into a checkpoint, or over weights unless told to.

    Args:
        out: The directory to write.
        overwrite: Weights that are there may be replaced.
        setting: How the user says so, for messages.

    Raises:
        CheckpointError: It is a checkpoint or inside one, no directory, or has weights.
    """
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; choose a directory")
    absolute = out.absolute()
    for directory in (absolute, *absolute.parents):
        if (directory / MANIFEST_NAME).exists():
            raise CheckpointError(
                f"{directory} is a checkpoint, which must not change; choose another directory"
            )
    existing = _existing_weights(out)
    if existing and not overwrite:
        raise CheckpointError(
            f"{out / existing[0]} exists; pass {setting} to replace the weights, or choose another directory"
        )


def place_files(staging: Path, out: Path) -> None:
    """Move complete files to their place, the index last, and remove weights they replace.

    Args:
        staging: Holds the files.
        out: The directory.
    """
    stale = set(_existing_weights(out))
    written = sorted((path.relative_to(staging) for path in staging.rglob("*") if path.is_file()), key=_order)
    for name in written:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(out / name)
    for old in stale - {str(name) for name in written}:
        (out / old).unlink()
    sync_file(out)


def _existing_weights(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(path.name for path in directory.iterdir() if _WEIGHTS.fullmatch(path.name))


def _order(name: Path) -> tuple[bool, str]:
    return name.name.endswith(".index.json"), str(name)
