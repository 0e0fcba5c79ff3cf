"""One load, from the chosen checkpoint to restored components."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import SharingPattern
from checkpoint_core.discovery import checkpoint_directories, good_checkpoints, verify_checkpoint
from checkpoint_core.encoding import EncodedState
from checkpoint_core.errors import CheckpointError
from checkpoint_core.manifest import ComponentPart, ComponentRecord, Manifest, read_manifest
from checkpoint_core.plan import Assignment, Plan, interchangeable
from checkpoint_core.storage import read, restore

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """The step at which it was saved."""
    missing: tuple[str, ...]
    """Keys of declared components that the checkpoint does not hold; they kept their fresh state."""


class _Choice(TypedDict):
    path: str
    step: int


class CheckpointLoad:
    """The load of one checkpoint.

    Args:
        ranks: The ranks that load together.
        plan: Who reads what.
    """

    def __init__(self, ranks: RankAgreement, plan: Plan) -> None:
        self._ranks = ranks
        self._plan = plan

    def run(self, output_dir: Path, path: Path | None) -> tuple[LoadedCheckpoint, Manifest] | None:
        """Choose, verify and restore. Collective.

        Args:
            output_dir: The directory of the checkpoints.
            path: The checkpoint; None for the newest good one.

        Returns:
            What was loaded, or None when there is nothing to load.

        Raises:
            CheckpointError: On every rank, when any failed.
        """
        choice = self._ranks.run_on_main("choosing a checkpoint", lambda: _choose(output_dir, path))
        if choice is None:
            return None
        directory = Path(choice["path"])
        phase = f"loading {directory}"
        manifest: Manifest | None = None

        def check() -> list[str]:
            nonlocal manifest
            manifest = read_manifest(directory)
            return self._missing(directory, manifest)

        missing_on_ranks = self._ranks.run(phase, check)
        # Old state on some ranks and fresh state on others would be neither: one missing file counts for all.
        missing = {key for keys in missing_on_ranks for key in keys}
        if manifest is None:
            raise CheckpointError(f"{phase}: no manifest was read")
        for key, pattern in self._plan.patterns.items():
            if key not in missing:
                self._restore(phase, directory, manifest, key, pattern)
        ordered = tuple(key for key in self._plan.patterns if key in missing)
        return LoadedCheckpoint(directory, manifest.step, ordered), manifest

    def _missing(self, directory: Path, manifest: Manifest) -> list[str]:
        missing = []
        for key, assignment in self._plan.assignments.items():
            if assignment.component.sharing_pattern is SharingPattern.GLOBAL and self._ranks.rank != 0:
                continue
            reason = self._why_missing(directory, manifest, assignment)
            if reason is None:
                continue
            if assignment.component.required:
                raise CheckpointError(f"the required component {key!r} cannot be loaded: {reason}")
            _logger.warning("%s: %s; component %r keeps its fresh state", directory.name, reason, key)
            missing.append(key)
        return missing

    def _why_missing(self, directory: Path, manifest: Manifest, assignment: Assignment) -> str | None:
        component = assignment.component
        record = manifest.component(component.key)
        if record is None:
            return f"the checkpoint was saved without component {component.key!r}"
        present = [name for part in record.parts for name in part.files if (directory / name).is_file()]
        if not present:
            return f"{record.parts[0].files[0]} was deleted"
        part = _part(record, assignment, manifest, self._ranks.world_size)
        deleted = [name for name in part.files if not (directory / name).is_file()]
        return f"{', '.join(deleted)} was deleted" if deleted else None

    def _restore(
        self, phase: str, directory: Path, manifest: Manifest, key: str, pattern: SharingPattern
    ) -> None:
        assignment = self._plan.assignments.get(key)
        encoded: EncodedState | None = None

        def read_part() -> None:
            nonlocal encoded
            record = manifest.component(key)
            if record is None or assignment is None:
                return
            if pattern is not SharingPattern.GLOBAL or self._ranks.rank == 0:
                part = _part(record, assignment, manifest, self._ranks.world_size)
                encoded = read(directory, part.files, record.format)

        def put_back() -> None:
            if assignment is not None and encoded is not None:
                restore(assignment.component.stateful, encoded)

        what = f"{phase}, component {key!r}"
        self._ranks.run(what, read_part)
        if pattern is SharingPattern.GLOBAL:
            encoded = self._ranks.share(what, encoded)
        self._ranks.run(what, put_back)


def _choose(output_dir: Path, path: Path | None) -> _Choice | None:
    if path is None:
        found = next(good_checkpoints(output_dir, checksums=True), None)
        if found is None:
            return None
        return _Choice(path=str(found[0].absolute()), step=found[1].step)
    if not (path / "manifest.json").is_file() and checkpoint_directories(path):
        newest = checkpoint_directories(path)[0][1]
        raise CheckpointError(f"{path} holds checkpoints but is none; pass one of them, such as {newest}")
    manifest = verify_checkpoint(path, checksums=True)
    if path.absolute().parent == output_dir.absolute():
        _warn_about_later(output_dir, manifest.step)
    return _Choice(path=str(path.absolute()), step=manifest.step)


def _warn_about_later(output_dir: Path, step: int) -> None:
    later = [path.name for number, path in checkpoint_directories(output_dir) if number > step]
    if later:
        _logger.warning(
            "%s holds later checkpoints (%s), which an automatic resume would choose; move them away to go "
            "on from step %d",
            output_dir,
            ", ".join(later),
            step,
        )


def _part(
    record: ComponentRecord, assignment: Assignment, manifest: Manifest, world_size: int
) -> ComponentPart:
    component = assignment.component
    wanted = component.sharing_pattern.value
    files = ", ".join(name for part in record.parts for name in part.files)
    remedy = f"delete {files} from the checkpoint to begin with fresh state for this component"
    if not interchangeable(record.pattern, wanted):
        raise CheckpointError(
            f"component {record.key!r} was saved as {record.pattern}, not {wanted}; {remedy}"
        )
    per_rank = component.sharing_pattern in (SharingPattern.PER_RANK, SharingPattern.PER_GROUP)
    part = record.part(assignment.writer)
    if part is None or (per_rank and manifest.world_size != world_size):
        raise CheckpointError(
            f"component {record.key!r} was saved {wanted} by {manifest.world_size} ranks and cannot be "
            f"loaded by {world_size}; use {manifest.world_size} ranks, or {remedy}"
        )
    return part
