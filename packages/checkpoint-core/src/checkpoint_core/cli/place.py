"""Putting exported files into their directory, only where that is safe."""

from pathlib import Path

from checkpoint_core.directory.manifest import MANIFEST_NAME
from checkpoint_core.errors import CheckpointError
from checkpoint_core.export import existing_weights
from checkpoint_core.storage.files import sync_file


def check_target(out: Path, overwrite: bool) -> None:
    """Refuse to write into a checkpoint, or over weights unless told to.

    Args:
        out: The directory to write.
        overwrite: Weights that are there may be replaced.

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
    existing = existing_weights(out)
    if existing and not overwrite:
        raise CheckpointError(
            f"{out / existing[0]} exists; pass --overwrite to replace the weights, or choose another OUT"
        )


def place_files(staging: Path, out: Path) -> None:
    """Move complete files to their place, the index last, and remove weights they replace.

    Args:
        staging: Holds the files.
        out: The directory.
    """
    stale = set(existing_weights(out))
    written = sorted((path.relative_to(staging) for path in staging.rglob("*") if path.is_file()), key=_order)
    for name in written:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(out / name)
    for old in stale - {str(name) for name in written}:
        (out / old).unlink()
    sync_file(out)


def _order(name: Path) -> tuple[bool, str]:
    return name.name.endswith(".index.json"), str(name)
