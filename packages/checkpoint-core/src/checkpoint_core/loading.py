"""One load, from the chosen checkpoint to restored components; or of weights alone into a model."""

import logging
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import nn

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.component_files import WEIGHTS_FORMAT
from checkpoint_core.components import (
    Assignment,
    Plan,
    SharingPattern,
    Stateful,
    is_reshardable,
)
from checkpoint_core.directory.manifest import (
    MANIFEST_NAME,
    ComponentPart,
    ComponentRecord,
    Manifest,
    read_manifest,
    wrong_content,
)
from checkpoint_core.directory.select import select_checkpoint
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.state.encoding import EncodedState, bundle, unbundle
from checkpoint_core.state.restore import (
    RestorePlan,
    StoredState,
    check_outline,
    check_unclaimed,
    decode,
    plan_restore,
    read_all,
    weight_files,
)
from checkpoint_core.state.weights import ModelState
from checkpoint_core.storage.files import checksum_file

_ONE_FOR_ALL = (SharingPattern.GLOBAL, SharingPattern.REPLICATED)
_ONE_COPY = {SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value, SharingPattern.SHARDED.value}
"""Patterns that store one copy, so that what was saved under one is loaded under another."""
_logger = logging.getLogger(__name__)


class Reader(NamedTuple):
    """One of those among whom saved states are distributed anew: the arguments of ``load_resharded``."""

    rank: int
    world_size: int


ONE_READER = Reader(0, 1)
"""All ranks together, where they take up one state."""


class ReadPlan(NamedTuple):
    """What one rank reads of a component."""

    parts: tuple[ComponentPart, ...]
    reader: Reader | None = None
    """Who takes the parts up with ``load_resharded``; None where the one part is loaded as it is."""


def _plan_reads(
    record: ComponentRecord, assignment: Assignment, manifest: Manifest, reader: Reader
) -> ReadPlan:
    """What a rank reads of a component: one part, or those of all ranks that saved.

    Raises:
        CheckpointError: What is stored cannot become what is declared.
    """
    wanted = assignment.component.sharing_pattern
    if record.pattern == SharingPattern.PER_RANK.value and wanted in _ONE_FOR_ALL:
        return _between(record, assignment, manifest, ONE_READER)
    if record.pattern in [pattern.value for pattern in _ONE_FOR_ALL] and wanted is SharingPattern.PER_RANK:
        return _between(record, assignment, manifest, reader)
    if record.pattern != wanted.value and not {record.pattern, wanted.value} <= _ONE_COPY:
        raise _other_pattern(record, assignment)
    if wanted not in (SharingPattern.PER_RANK, SharingPattern.PER_GROUP):
        return ReadPlan((record.parts[0],))
    part = record.part(assignment.writer)
    if part is not None and manifest.world_size == reader.world_size:
        return ReadPlan((part,))
    if wanted is SharingPattern.PER_RANK and is_reshardable(assignment.component.stateful):
        return ReadPlan(_parts_of_all(record, manifest), reader)
    raise CheckpointError(
        f"component {record.key!r} was saved {record.pattern} by {manifest.world_size} ranks and cannot be "
        f"loaded by {reader.world_size}. Use {manifest.world_size} ranks, or {_fresh_start(record)}."
    )


def _between(record: ComponentRecord, assignment: Assignment, manifest: Manifest, reader: Reader) -> ReadPlan:
    """Between one state for all ranks and one for each."""
    saved_by = manifest.world_size if record.pattern == SharingPattern.PER_RANK.value else 1
    if saved_by == reader.world_size == 1:
        return ReadPlan((record.parts[0],))
    if not is_reshardable(assignment.component.stateful):
        raise _other_pattern(record, assignment)
    parts = tuple(record.parts) if saved_by == 1 else _parts_of_all(record, manifest)
    return ReadPlan(parts, reader)


def _parts_of_all(record: ComponentRecord, manifest: Manifest) -> tuple[ComponentPart, ...]:
    held = len(record.parts)
    if held == manifest.world_size:
        return tuple(sorted(record.parts, key=lambda part: part.writer))
    raise CheckpointError(
        f"component {record.key!r} was saved {record.pattern} by {manifest.world_size} ranks, and this node "
        f"holds the files of {held} of them, but all are needed to distribute it anew. Let every node hold "
        f"the files of all ranks, load it as {record.pattern} by {manifest.world_size} ranks, or "
        f"{_fresh_start(record)}."
    )


def _other_pattern(record: ComponentRecord, assignment: Assignment) -> CheckpointError:
    wanted = assignment.component.sharing_pattern.value
    return CheckpointError(
        f"component {record.key!r} was saved as {record.pattern}, not {wanted}. Declare it as "
        f"{record.pattern}, or {_fresh_start(record)}."
    )


def _fresh_start(record: ComponentRecord) -> str:
    files = ", ".join(name for part in record.parts for name in part.files)
    return f"delete {files} from the checkpoint to begin with fresh state for this component"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded."""

    path: Path
    """The checkpoint's directory."""
    step: int
    """The step at which it was saved."""
    missing: tuple[str, ...]
    """Keys of declared components that the checkpoint does not hold; they kept their fresh state."""
    bytes_read: int
    """Bytes of tensors and file headers that this rank read to restore its components. Verification, which
    the ranks share evenly, reads the bytes of all files once more."""


def load(
    ranks: RankAgreement, plan: Plan, output_dir: Path, path: Path | None
) -> tuple[LoadedCheckpoint, Manifest] | None:
    """Choose a checkpoint, verify it and restore its components. Collective.

    Args:
        ranks: The ranks that load together.
        plan: Who reads what.
        output_dir: The directory of the checkpoints.
        path: The checkpoint; None for the newest good one.

    Returns:
        What was loaded, or None when there is nothing to load.

    Raises:
        CheckpointError: On every rank, when any failed.
    """
    chosen = select_checkpoint(ranks, output_dir, path)
    if chosen is None:
        return None
    with ExitStack() as files:
        return _Restoring(ranks, plan, *chosen, files).run(), chosen[1]


class _Restoring:
    """Restores components: first all are matched with their objects, then all are read."""

    def __init__(
        self,
        ranks: RankAgreement,
        plan: Plan,
        directory: Path,
        manifest: Manifest,
        files: ExitStack,
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._directory = directory
        self._manifest = manifest
        self._phase = f"loading {directory}"
        self._files = files
        self._stored: dict[str, list[StoredState]] = {}
        self._readers: dict[str, Reader] = {}
        self._restores: dict[str, RestorePlan] = {}

    def run(self) -> LoadedCheckpoint:
        missing_on_ranks = self._ranks.run(self._phase, self._missing)
        # Old state on some ranks and fresh state on others would be neither: one missing file counts for all.
        missing = {key for keys in missing_on_ranks for key in keys}
        keys = [key for key in self._plan.patterns if key not in missing]
        for key in keys:
            self._ranks.run(f"{self._phase}, component {key!r}", lambda key=key: self._open(key))  # type: ignore[misc]
        for key in keys:
            self._match_shared(key)
        unclaimed = self._ranks.run(
            self._phase, lambda: {key: list(plan.unclaimed) for key, plan in self._restores.items()}
        )
        for key in keys:
            self._check_unclaimed(key, [each.get(key, []) for each in unclaimed])
        for key in keys:
            self._restore(key)
        count = sum(stored.bytes_read for some in self._stored.values() for stored in some)
        ordered = tuple(key for key in self._plan.patterns if key in missing)
        return LoadedCheckpoint(self._directory, self._manifest.step, ordered, count)

    def _missing(self) -> list[str]:
        missing = []
        for key, assignment in self._plan.assignments.items():
            if assignment.component.sharing_pattern is SharingPattern.GLOBAL and self._ranks.rank != 0:
                continue
            reason = self._why_missing(assignment)
            if reason is None:
                continue
            if assignment.component.required:
                raise CheckpointError(
                    f"the required component {key!r} cannot be loaded: {reason}. Restore its files, load "
                    "another checkpoint, or declare it with required=False to begin with fresh state."
                )
            _logger.warning("%s: %s; component %r keeps its fresh state", self._directory.name, reason, key)
            missing.append(key)
        return missing

    def _why_missing(self, assignment: Assignment) -> str | None:
        component = assignment.component
        record = self._manifest.component(component.key)
        if record is None:
            return f"the checkpoint was saved without component {component.key!r}"
        present = [name for part in record.parts for name in part.files if (self._directory / name).is_file()]
        if not present:
            return f"{record.parts[0].files[0]} was deleted"
        reader = Reader(self._ranks.rank, self._ranks.world_size)
        parts = _plan_reads(record, assignment, self._manifest, reader).parts
        deleted = [name for part in parts for name in part.files if not (self._directory / name).is_file()]
        return f"{', '.join(deleted)} was deleted" if deleted else None

    def _open(self, key: str) -> None:
        assignment = self._plan.assignments.get(key)
        record = self._manifest.component(key)
        if assignment is None or record is None:
            return
        if self._plan.patterns[key] is SharingPattern.GLOBAL and self._ranks.rank != 0:
            return
        reader = Reader(self._ranks.rank, self._ranks.world_size)
        reading = _plan_reads(record, assignment, self._manifest, reader)
        stored = []
        for part in reading.parts:
            stored.append(StoredState([self._directory / name for name in part.files], record.format))
            self._files.callback(stored[-1].close)
        self._stored[key] = stored
        stateful = assignment.component.stateful
        if reading.reader is not None:
            self._readers[key] = reading.reader
        elif not self._is_shared(key):
            self._restores[key] = plan_restore(stateful, stored[0])

    def _is_shared(self, key: str) -> bool:
        """Whether rank 0 reads a component and hands it to the other ranks."""
        return self._plan.patterns[key] is SharingPattern.GLOBAL and self._ranks.world_size > 1

    def _match_shared(self, key: str) -> None:
        if not self._is_shared(key):
            return
        what = f"{self._phase}, component {key!r}"
        assignment = self._plan.assignments.get(key)
        outlines = self._ranks.run_on_main(what, lambda: [stored.outline() for stored in self._stored[key]])

        def check() -> None:
            if assignment is None:
                return
            stateful = assignment.component.stateful
            if len(outlines) == 1:
                check_outline(stateful, outlines[0])
            elif not is_reshardable(stateful):
                raise CheckpointError(
                    f"{len(outlines)} ranks saved a state each, and a {type(stateful).__name__} has no "
                    "load_resharded(states, rank=, world_size=) to make one of them, as rank 0 has. "
                    "Declare objects of one kind on all ranks."
                )

        self._ranks.run(what, check)

    def _check_unclaimed(self, key: str, by_rank: list[list[str]]) -> None:
        # A pure function of what all ranks gathered, so all ranks come to the same error.
        assignment = self._plan.assignments.get(key)
        sharded = self._plan.patterns[key] is SharingPattern.SHARDED
        left = (
            set(by_rank[0]).intersection(*by_rank[1:]) if sharded else {n for names in by_rank for n in names}
        )
        if not left or assignment is None:
            return
        try:
            check_unclaimed(assignment.component.stateful, sorted(left))
        except CheckpointError as error:
            raise CheckpointError(f"{self._phase}, component {key!r}: {error}") from error

    def _restore(self, key: str) -> None:
        assignment = self._plan.assignments.get(key)
        what = f"{self._phase}, component {key!r}"
        stored: list[EncodedState] = []

        def read() -> None:
            if key in self._restores:
                self._stored[key][0].fill(self._restores[key].fills, self._ranks.threads)
                return
            for each in self._stored.get(key, []):
                stored.append(EncodedState(*read_all(each, self._ranks.threads)))

        def put_back() -> None:
            if assignment is None:
                return
            stateful = assignment.component.stateful
            reader = self._readers.get(key, ONE_READER)
            method = "load_state_dict" if len(stored) < 2 and reader == ONE_READER else "load_resharded"
            try:
                if key in self._restores:
                    self._restores[key].finish()
                else:
                    _take_up(stateful, stored, reader)
            except CheckpointError:
                raise
            except Exception as error:
                record = self._manifest.component(key)
                parts = [] if record is None else record.parts
                files = ", ".join(name for part in parts for name in part.files)
                kind = type(stateful).__name__
                raise CheckpointError(
                    f"{kind}.{method}() failed ({describe_error(error).removesuffix('.')}). Mend the object, "
                    f"or delete {files} from the checkpoint to begin with fresh state for this component."
                ) from error

        self._ranks.run(what, read)
        if self._is_shared(key):
            stored = unbundle(self._ranks.share(what, bundle(stored)))
        self._ranks.run(what, put_back)


def _take_up(stateful: Stateful, stored: Sequence[EncodedState], reader: Reader) -> None:
    states = [decode(each.document, each.tensors) for each in stored]
    if len(states) == reader.world_size == 1:
        stateful.load_state_dict(states[0])
    elif is_reshardable(stateful):
        stateful.load_resharded(states, rank=reader.rank, world_size=reader.world_size)


def load_model_weights(
    model: nn.Module,
    directory: str | Path,
    *,
    verify_checksums: bool = True,
    elsewhere: Container[str] = (),
) -> None:
    """Load the weights of a Hugging Face directory, or of a checkpoint, into a model.

    Of parameters that are DTensors each rank reads only the bytes of its own part; there is no communication.

    Args:
        model: The model; its parameters keep their dtype and device.
        directory: A directory with ``model.safetensors`` or an index and its shards.
        verify_checksums: In a checkpoint, first read the weight files whole and compare their checksums.
            Every rank does so for itself; for a large sharded model verify once and pass False. Other
            directories have no checksums.
        elsewhere: For a part of a model: names of weights that other ranks hold, which may be left over.

    Raises:
        CheckpointError: The weights are missing, damaged, or do not fit the model; or the dtype of a
            parameter cannot hold its values, not even rounded.
    """
    try:
        model_state = ModelState(model)
        paths = weight_files(Path(directory))
        if verify_checksums and (Path(directory) / MANIFEST_NAME).is_file():
            _verify(Path(directory), paths)
        stored = StoredState(paths, WEIGHTS_FORMAT)
        try:
            plan = plan_restore(model_state, stored)
            check_unclaimed(model_state, [name for name in plan.unclaimed if name not in elsewhere])
            stored.fill(plan.fills, threads=1)
            plan.finish()
        finally:
            stored.close()
    except OSError as error:
        raise CheckpointError(f"loading weights from {directory}: {describe_error(error)}") from error


def _verify(checkpoint: Path, paths: Sequence[Path]) -> None:
    records = read_manifest(checkpoint).files
    for path in paths:
        if checksum_file(path) != records.get(path.name):
            raise wrong_content(path)
