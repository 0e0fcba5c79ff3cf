"""Which stored parts of a component a rank reads, and whether they are distributed anew."""

from typing import NamedTuple

from checkpoint_core.components import SharingPattern, is_reshardable
from checkpoint_core.directory.manifest import ComponentPart, ComponentRecord, Manifest
from checkpoint_core.errors import CheckpointError
from checkpoint_core.ranks.plan import Assignment, interchangeable

_ONE_FOR_ALL = (SharingPattern.GLOBAL, SharingPattern.REPLICATED)


class Reader(NamedTuple):
    """One of those among whom saved states are distributed anew: the arguments of ``load_resharded``."""

    rank: int
    world_size: int


ONE_READER = Reader(0, 1)
"""All ranks together, where they take up one state."""


class Reading(NamedTuple):
    """What one rank reads of a component."""

    parts: tuple[ComponentPart, ...]
    reader: Reader | None = None
    """Who takes the parts up with ``load_resharded``; None where the one part is loaded as it is."""


def reading_of(
    record: ComponentRecord, assignment: Assignment, manifest: Manifest, reader: Reader
) -> Reading:
    """What a rank reads of a component.

    Args:
        record: The component in the checkpoint.
        assignment: This rank's part in it now.
        manifest: The checkpoint.
        reader: This rank, and the number of ranks now.

    Returns:
        One part, or those of all ranks that saved.

    Raises:
        CheckpointError: What is stored cannot become what is declared.
    """
    wanted = assignment.component.sharing_pattern
    if record.pattern == SharingPattern.PER_RANK.value and wanted in _ONE_FOR_ALL:
        return _between(record, assignment, manifest, ONE_READER)
    if record.pattern in [pattern.value for pattern in _ONE_FOR_ALL] and wanted is SharingPattern.PER_RANK:
        return _between(record, assignment, manifest, reader)
    if not interchangeable(record.pattern, wanted.value):
        raise _other_pattern(record, assignment)
    if wanted not in (SharingPattern.PER_RANK, SharingPattern.PER_GROUP):
        return Reading((record.parts[0],))
    part = record.part(assignment.writer)
    if part is not None and manifest.world_size == reader.world_size:
        return Reading((part,))
    if wanted is SharingPattern.PER_RANK and is_reshardable(assignment.component.stateful):
        return Reading(_parts_of_all(record, manifest), reader)
    raise CheckpointError(
        f"component {record.key!r} was saved {record.pattern} by {manifest.world_size} ranks and cannot be "
        f"loaded by {reader.world_size}; use {manifest.world_size} ranks, or {_fresh_start(record)}"
    )


def _between(record: ComponentRecord, assignment: Assignment, manifest: Manifest, reader: Reader) -> Reading:
    """Between one state for all ranks and one for each."""
    saved_by = manifest.world_size if record.pattern == SharingPattern.PER_RANK.value else 1
    if saved_by == reader.world_size == 1:
        return Reading((record.parts[0],))
    if not is_reshardable(assignment.component.stateful):
        raise _other_pattern(record, assignment)
    parts = tuple(record.parts) if saved_by == 1 else _parts_of_all(record, manifest)
    return Reading(parts, reader)


def _parts_of_all(record: ComponentRecord, manifest: Manifest) -> tuple[ComponentPart, ...]:
    held = len(record.parts)
    if held == manifest.world_size:
        return tuple(sorted(record.parts, key=lambda part: part.writer))
    raise CheckpointError(
        f"component {record.key!r} was saved {record.pattern} by {manifest.world_size} ranks, and this node "
        f"holds the files of {held} of them, but all are needed to distribute it anew; let every node hold "
        f"the files of all ranks, load it as {record.pattern} by {manifest.world_size} ranks, or "
        f"{_fresh_start(record)}"
    )


def _other_pattern(record: ComponentRecord, assignment: Assignment) -> CheckpointError:
    wanted = assignment.component.sharing_pattern.value
    return CheckpointError(
        f"component {record.key!r} was saved as {record.pattern}, not {wanted}; {_fresh_start(record)}"
    )


def _fresh_start(record: ComponentRecord) -> str:
    files = ", ".join(name for part in record.parts for name in part.files)
    return f"delete {files} from the checkpoint to begin with fresh state for this component"
