"""One load, from the chosen checkpoint to restored components."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from checkpoint_core.components import SharingPattern, Stateful, is_reshardable
from checkpoint_core.directory.choosing import choose
from checkpoint_core.directory.manifest import Manifest
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.ranks.agreement import RankAgreement
from checkpoint_core.ranks.plan import Assignment, Plan
from checkpoint_core.ranks.readings import ONE_READER, Reader, reading_of
from checkpoint_core.state.bundle import bundle, unbundle
from checkpoint_core.state.encoding import EncodedState
from checkpoint_core.state.optimizer import OptimizerState
from checkpoint_core.state.optimizer import check_nothing_left as check_no_parameters_left
from checkpoint_core.state.receive import Reception, StoredState, check_outline, decode, read_all, receive
from checkpoint_core.state.weights import ModelState
from checkpoint_core.state.weights import check_nothing_left as check_no_weights_left

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
    bytes_read: int
    """Bytes of tensors and file headers that this rank read to restore its components. Verification, which
    the ranks share evenly, reads the bytes of all files once more."""


class CheckpointLoad:
    """The load of one checkpoint.

    Args:
        ranks: The ranks that load together.
        plan: Who reads what.
    """

    def __init__(self, ranks: RankAgreement, plan: Plan) -> None:
        self._ranks = ranks
        self._plan = plan
        self._directory = Path()
        self._manifest: Manifest | None = None

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
        chosen = choose(self._ranks, output_dir, path)
        if chosen is None:
            return None
        directory, manifest = chosen
        phase = f"loading {directory}"
        missing_on_ranks = self._ranks.run(phase, lambda: self._missing(directory, manifest))
        # Old state on some ranks and fresh state on others would be neither: one missing file counts for all.
        missing = {key for keys in missing_on_ranks for key in keys}
        keys = [key for key in self._plan.patterns if key not in missing]
        with ExitStack() as files:
            count = _Restoring(self._ranks, self._plan, directory, manifest, phase, files).run(keys)
        ordered = tuple(key for key in self._plan.patterns if key in missing)
        return LoadedCheckpoint(directory, manifest.step, ordered, count), manifest

    def _missing(self, directory: Path, manifest: Manifest) -> list[str]:
        missing = []
        for key, assignment in self._plan.assignments.items():
            if assignment.component.sharing_pattern is SharingPattern.GLOBAL and self._ranks.rank != 0:
                continue
            reason = self._why_missing(directory, manifest, assignment)
            if reason is None:
                continue
            if assignment.component.required:
                raise CheckpointError(
                    f"the required component {key!r} cannot be loaded: {reason}. Restore its files, load "
                    "another checkpoint, or declare it with required=False to begin with fresh state"
                )
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
        reader = Reader(self._ranks.rank, self._ranks.world_size)
        parts = reading_of(record, assignment, manifest, reader).parts
        deleted = [name for part in parts for name in part.files if not (directory / name).is_file()]
        return f"{', '.join(deleted)} was deleted" if deleted else None


class _Restoring:
    """Restores components: first all are matched with their objects, then all are read."""

    def __init__(
        self,
        ranks: RankAgreement,
        plan: Plan,
        directory: Path,
        manifest: Manifest,
        phase: str,
        files: ExitStack,
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._directory = directory
        self._manifest = manifest
        self._phase = phase
        self._files = files
        self._stored: dict[str, list[StoredState]] = {}
        self._readers: dict[str, Reader] = {}
        self._receptions: dict[str, Reception] = {}

    def run(self, keys: list[str]) -> int:
        """Restore components. Collective.

        Args:
            keys: Their keys.

        Returns:
            Bytes read by this rank.
        """
        for key in keys:
            self._ranks.run(f"{self._phase}, component {key!r}", lambda key=key: self._open(key))  # type: ignore[misc]
        for key in keys:
            self._match_shared(key)
        unclaimed = self._ranks.run(self._phase, self._unclaimed)
        for key in keys:
            self._check_unclaimed(key, [each.get(key, []) for each in unclaimed])
        for key in keys:
            self._restore(key)
        return sum(stored.bytes_read for some in self._stored.values() for stored in some)

    def _open(self, key: str) -> None:
        assignment = self._plan.assignments.get(key)
        record = self._manifest.component(key)
        if assignment is None or record is None or not self._reads(key):
            return
        reader = Reader(self._ranks.rank, self._ranks.world_size)
        reading = reading_of(record, assignment, self._manifest, reader)
        stored = []
        for part in reading.parts:
            stored.append(StoredState([self._directory / name for name in part.files], record.format))
            self._files.callback(stored[-1].close)
        self._stored[key] = stored
        stateful = assignment.component.stateful
        if reading.reader is not None:
            self._readers[key] = reading.reader
        elif not self._is_shared(key):
            self._receptions[key] = receive(stateful, stored[0])

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
                    "load_resharded(states, rank=, world_size=) to make one of them, as rank 0 has; declare "
                    "objects of one kind on all ranks"
                )

        self._ranks.run(what, check)

    def _reads(self, key: str) -> bool:
        return self._plan.patterns[key] is not SharingPattern.GLOBAL or self._ranks.rank == 0

    def _unclaimed(self) -> dict[str, list[str]]:
        return {key: list(reception.unclaimed) for key, reception in self._receptions.items()}

    def _check_unclaimed(self, key: str, by_rank: list[list[str]]) -> None:
        # A pure function of what all ranks gathered, so all ranks come to the same error.
        assignment = self._plan.assignments.get(key)
        sharded = self._plan.patterns[key] is SharingPattern.SHARDED
        left = (
            set(by_rank[0]).intersection(*by_rank[1:]) if sharded else {n for names in by_rank for n in names}
        )
        if not left or assignment is None:
            return
        names = sorted(left)
        try:
            if isinstance(assignment.component.stateful, ModelState):
                check_no_weights_left(names)
            elif isinstance(assignment.component.stateful, OptimizerState):
                check_no_parameters_left(names)
        except CheckpointError as error:
            raise CheckpointError(f"{self._phase}, component {key!r}: {error}") from error

    def _restore(self, key: str) -> None:
        assignment = self._plan.assignments.get(key)
        what = f"{self._phase}, component {key!r}"
        stored: list[EncodedState] = []

        def read() -> None:
            if key in self._receptions:
                self._stored[key][0].fill(self._receptions[key].fills, self._ranks.threads)
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
                if key in self._receptions:
                    self._receptions[key].finish()
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
                    f"{kind}.{method}() failed ({describe_error(error)}); mend the object, or delete "
                    f"{files} from the checkpoint to begin with fresh state for this component"
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
