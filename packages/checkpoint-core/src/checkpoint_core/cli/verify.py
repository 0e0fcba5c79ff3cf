"""``verify``: every file against its size and checksum."""

from pathlib import Path

from checkpoint_core.cli.console import printable, size_text
from checkpoint_core.cli.survey import State, Survey, describe_leftover, survey, survey_all
from checkpoint_core.directory.discovery import checkpoint_directories
from checkpoint_core.directory.manifest import MANIFEST_NAME, Manifest
from checkpoint_core.directory.ownership import find_leftovers
from checkpoint_core.errors import CheckpointError

_PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}


def verify(path: Path) -> int:
    """Verify one checkpoint, or each checkpoint of a directory, and print what was found.

    Args:
        path: The checkpoint or the directory.

    Returns:
        0 when all is whole, 1 when something is damaged or torn.

    Raises:
        CheckpointError: There is nothing to verify, or a manifest is of a newer version.
        OSError: A file cannot be read.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}; pass a checkpoint, or what holds checkpoints")
    inside = bool(checkpoint_directories(path))
    single = (path / MANIFEST_NAME).is_file() or not inside
    if single and not inside and not _claims_to_be_checkpoint(path):
        raise CheckpointError(
            f"{path} has no {MANIFEST_NAME} and holds no checkpoint-<step>; pass one that does"
        )
    whole = True
    for found in [survey(path, checksums=True)] if single else survey_all(path, checksums=True):
        if found.state is State.NEWER:
            raise CheckpointError(f"{found.path}: {found.problems[0]}")
        _report(found)
        whole = whole and found.good
    for leftover in [] if single else find_leftovers(path):
        print(f"{leftover.path.name}: not a checkpoint: {describe_leftover(leftover)}")
    return 0 if whole else 1


def _claims_to_be_checkpoint(path: Path) -> bool:
    absolute = path.absolute()
    return (path / MANIFEST_NAME).is_file() or absolute in {
        found for _, found in checkpoint_directories(absolute.parent)
    }


def _report(found: Survey) -> None:
    name = found.path
    manifest = found.manifest
    if manifest is None or not found.good:
        print(f"{name}: {found.state.value}")
    else:
        size = sum(record.size for record in manifest.files.values())
        count = len(manifest.files) - len(found.deleted)
        print(f"{name}: whole, step {manifest.step}, {count} file(s), {size_text(size)}")
    for problem in found.problems:
        print(f"  {found.state.value}: {printable(problem)}")
    for file in found.deleted:
        print(f"  deleted: {printable(file)}{_loss(manifest, file)}")
    for file in _unknown(found.path, manifest) if manifest else []:
        pickle = Path(file).suffix.lower() in _PICKLES
        what = "a pickle by its name, which is never read" if pickle else "not in the manifest, never loaded"
        print(f"  unknown: {printable(file)} ({what})")


def _loss(manifest: Manifest | None, file: str) -> str:
    for record in manifest.components if manifest else []:
        if any(file in part.files for part in record.parts):
            return f" (component {printable(record.key)} starts fresh, or is an error if it is required)"
    return ""


def _unknown(checkpoint: Path, manifest: Manifest) -> list[str]:
    found = []
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if not path.is_dir() and name != MANIFEST_NAME and name not in manifest.files:
            found.append(name)
    return found
