"""One load: components are matched with what is stored of them, then read, then restored."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.components import Assignment, Plan, SharingPattern, Stateful, is_reshardable
from checkpoint_core.encoding import TAG, EncodedState, decode_state, local_part
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import read_json
from checkpoint_core.manifest import STATE_FORMAT, WEIGHTS_FORMAT, ComponentPart, ComponentRecord, Manifest
from checkpoint_core.model_state import ModelState, OptimizerState, check_tie
from checkpoint_core.peers import Peers, file_finder
from checkpoint_core.selection import Chosen, newest_in_memory, select_checkpoint
from checkpoint_core.tensor_files import FORMAT_ENTRY, FileLayout, JsonSpec, TensorFileReader, TensorSpec

Fills = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class RestorePlan:
    """How one component takes up stored state."""

    fills: Fills
    """The stored tensors to read, and the memory to read them into."""
    finish: Callable[[], None]
    """Called once all are read."""
    unclaimed: Sequence[str]
    """Stored names that this rank has no use for."""


class Outline(TypedDict):
    """Stored state without the values of its tensors."""

    specs: dict[str, JsonSpec]
    aliases: dict[str, str]
    document: object


class StoredState:
    """The files of one component, or of the part of one rank, open for reading.

    Args:
        paths: The files.
        storage_format: Their format.

    Raises:
        CheckpointError: The format is unknown or a file is damaged.
        OSError: A file cannot be read.
    """

    def __init__(self, paths: Sequence[Path], storage_format: str) -> None:
        if storage_format not in (WEIGHTS_FORMAT, STATE_FORMAT):
            raise CheckpointError(
                f"{paths[0]} is stored in the unknown format {storage_format!r}. Upgrade checkpoint-core."
            )
        self.document: object = None
        self.specs: dict[str, TensorSpec] = {}
        self.aliases: dict[str, str] = {}
        self._readers: dict[str, TensorFileReader] = {}
        self._open = ExitStack()
        with ExitStack() as opening:
            for path in paths:
                if path.suffix == ".json":
                    self.document = read_json(path)
                else:
                    self._add(opening.enter_context(TensorFileReader(path)), storage_format)
            self._open = opening.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def outline(self) -> Outline:
        """What matching needs, in a form that travels as JSON."""
        specs = {name: spec.to_json() for name, spec in self.specs.items()}
        return Outline(specs=specs, aliases=self.aliases, document=self.document)

    @property
    def bytes_read(self) -> int:
        """Bytes of headers and tensors that were read so far."""
        return sum(reader.bytes_read for reader in set(self._readers.values()))

    def fill(self, fills: Fills, threads: int) -> None:
        """Read tensors.

        Args:
            fills: Stored names and the memory to read them into.
            threads: How many threads read.
        """
        by_reader: dict[TensorFileReader, list[tuple[str, torch.Tensor]]] = {}
        for name, target in fills:
            by_reader.setdefault(self._readers[name], []).append((name, target))
        for reader, some in by_reader.items():
            reader.fill(some, threads)

    def _add(self, reader: TensorFileReader, storage_format: str) -> None:
        for name, place in reader.layout.places.items():
            if name in self.specs:
                raise CheckpointError(f"{reader.path} repeats tensor {name} of another file.")
            self.specs[name] = place.spec
            self._readers[name] = reader
        if storage_format == WEIGHTS_FORMAT:
            self.aliases |= _stored_aliases(reader.layout)


def plan_restore(stateful: Stateful, stored: StoredState) -> RestorePlan:
    """Match stored state with an object. Nothing of the object changes yet.

    Args:
        stateful: The component's object.
        stored: The stored state.

    Returns:
        What to read, and how to finish.

    Raises:
        CheckpointError: The state does not fit the object; names what does not.
    """
    if isinstance(stateful, ModelState):
        return _plan_weights(stateful, stored)
    if isinstance(stateful, OptimizerState):
        return _plan_optimizer(stateful, stored)
    return _plan_state(stateful, stored.document, stored, lambda _, spec: spec.empty(), [])


def check_outline(stateful: Stateful, outline: Outline) -> None:
    """Compare an object with stored state that another rank has open. Nothing changes.

    Args:
        stateful: The component's object.
        outline: The stored state.

    Raises:
        CheckpointError: The state does not fit the object; names what does not.
    """
    if isinstance(stateful, ModelState):
        specs = {name: TensorSpec.from_json(spec) for name, spec in outline["specs"].items()}
        check_unclaimed(stateful, stateful.match(specs, outline["aliases"]).unexpected)
    elif isinstance(stateful, OptimizerState):
        check_unclaimed(stateful, stateful.match(_optimizer_document(outline["document"])))


def check_unclaimed(stateful: Stateful, names: Sequence[str]) -> None:
    """Refuse stored weights, or optimizer state of parameters, that no object has taken.

    Args:
        stateful: The component's object.
        names: Their names; may be empty.

    Raises:
        CheckpointError: There are any; names them.
    """
    if isinstance(stateful, (ModelState, OptimizerState)):
        stateful.check_nothing_left(names)


def read_all(stored: StoredState, threads: int) -> tuple[object, dict[str, torch.Tensor]]:
    """Read a state without an object to receive it.

    Args:
        stored: The stored state.
        threads: How many threads read.

    Returns:
        The document and the tensors by name, on the CPU. For weights the document tells which names share
        a tensor.
    """
    tensors = {name: spec.empty() for name, spec in stored.specs.items()}
    stored.fill(list(tensors.items()), threads)
    if stored.document is not None:
        return stored.document, tensors
    names = {**{name: name for name in tensors}, **stored.aliases}
    return {name: {TAG: "tensor", "name": stored_name} for name, stored_name in names.items()}, tensors


def decode(document: object, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """A state from its document and tensors.

    Raises:
        CheckpointError: The document refers to a tensor that is not there, or is not a dict.
    """

    def find(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"the state refers to tensor {name}, which its files do not hold.")
        return tensors[name]

    state = decode_state(document, find)
    if not isinstance(state, dict):
        raise CheckpointError(f"the stored state is a {type(state).__name__}, not a dict.")
    return state


def _plan_weights(model: ModelState, stored: StoredState) -> RestorePlan:
    match = model.match(stored.specs, stored.aliases)
    live = model.tensors()
    for name, other in match.repeated:
        # Files of other programs may hold a tied weight twice; before anything changes, both are compared.
        first, second = torch.empty_like(live[name]), torch.empty_like(live[name])
        stored.fill([(match.sources[name], first), (other, second)], threads=1)
        check_tie(name, local_part(first, name).data, other, local_part(second, name).data)
    fills = [(source, live[name]) for name, source in match.sources.items()]
    return RestorePlan(fills, lambda: None, match.unexpected)


def _plan_optimizer(optimizer: OptimizerState, stored: StoredState) -> RestorePlan:
    document = _optimizer_document(stored.document)
    unclaimed = optimizer.match(document)
    live = optimizer.by_name()
    own = {
        section: {name: node for name, node in document[section].items() if name in live}
        for section in ("parameters", "state")
    }
    owner = {
        stored_name: live[name]
        for name, values in own["state"].items()
        for stored_name in _tensor_names(values)
    }

    def target(name: str, spec: TensorSpec) -> torch.Tensor:
        parameter = owner.get(name)
        if parameter is None or not spec.shape or spec.shape != tuple(parameter.shape):
            return spec.empty()
        # State of the parameter's shape is placed as the parameter is: on its device, with its shards.
        return torch.empty_like(parameter.detach(), dtype=spec.dtype)

    return _plan_state(optimizer, own, stored, target, unclaimed)


def _optimizer_document(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise CheckpointError("the stored optimizer state is not an object, so it is not an OptimizerState.")
    return document


def _plan_state(
    stateful: Stateful,
    document: object,
    stored: StoredState,
    target: Callable[[str, TensorSpec], torch.Tensor],
    unclaimed: Sequence[str],
) -> RestorePlan:
    tensors = {
        name: target(name, stored.specs[name]) for name in _tensor_names(document) if name in stored.specs
    }
    # Now, so that a malformed document is found before anything changes; the values come in place later.
    state = decode(document, tensors)

    def finish() -> None:
        stateful.load_state_dict(state)

    return RestorePlan(list(tensors.items()), finish, unclaimed)


def _tensor_names(document: object) -> dict[str, None]:
    """Names of the tensors that a document refers to, each once, in order."""
    names: dict[str, None] = {}
    waiting = [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and node.get(TAG) == "tensor":
            names[str(node.get("name"))] = None
        elif isinstance(node, (dict, list)):
            waiting.extend(reversed(node.values() if isinstance(node, dict) else node))
    return names


def _stored_aliases(layout: FileLayout) -> dict[str, str]:
    """Name of the stored tensor, by alias, as the metadata of a file of weights tells it."""
    return {
        alias: name
        for alias, name in layout.metadata.items()
        if alias != FORMAT_ENTRY and name in layout.places and alias not in layout.places
    }


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
    ranks: RankAgreement,
    plan: Plan,
    output_dir: Path,
    path: Path | None,
    remote_dir: Path | None = None,
    peers: Peers | None = None,
    *,
    continues: bool = True,
    memory: tuple[RankAgreement, Plan, Path] | None = None,
    only_memory: bool = False,
) -> tuple[LoadedCheckpoint, Manifest] | None:
    """Choose a checkpoint, verify it and restore its components. Collective.

    Args:
        ranks: The ranks that load together.
        plan: Who reads what.
        output_dir: The directory of the checkpoints.
        path: The checkpoint; None for the newest good one, also of ``remote_dir``.
        remote_dir: A second tier.
        peers: The nodes, where they keep checkpoints together.
        continues: Whether the run continues from it, which a warning tells of where later ones are there.
        memory: The tier in memory, whose checkpoint of a step is preferred: its ranks, who reads what there,
            and its directory.
        only_memory: Whether the other tiers are left out.

    Returns:
        What was loaded, or None when there is nothing to load.

    Raises:
        CheckpointError: On every rank, when any failed.
    """
    held, chosen = None if memory is None else newest_in_memory(memory[0], memory[2]), None
    if not only_memory:
        above = held and held.manifest.step
        chosen = select_checkpoint(ranks, output_dir, path, remote_dir, continues=continues, above=above)
    if chosen is None and held is not None and memory is not None:
        (ranks, plan, _), chosen, peers = memory, held, None
    if chosen is None:
        return None
    with ExitStack() as files:
        return _Restoring(ranks, plan, chosen, peers, files).run(), chosen.manifest


class _Restoring:
    """Restores components: first all are matched with their objects, then all are read."""

    def __init__(
        self, ranks: RankAgreement, plan: Plan, chosen: Chosen, peers: Peers | None, files: ExitStack
    ) -> None:
        self._ranks = ranks
        self._plan = plan
        self._directory = chosen.path
        self._manifest = chosen.manifest
        self._find = file_finder(ranks, peers, *chosen)
        self._phase = f"loading {chosen.path}"
        self._files = files
        self._reader = Reader(ranks.rank, ranks.world_size)
        self._reads: dict[str, ReadPlan] = {}
        self._stored: dict[str, list[StoredState]] = {}
        self._restores: dict[str, RestorePlan] = {}

    def run(self) -> LoadedCheckpoint:
        missing_on_ranks = self._ranks.run(self._phase, self._missing)
        # Old state on some ranks and fresh state on others would be neither: one missing file counts for all.
        missing = {key for keys in missing_on_ranks for key in keys}
        keys = [key for key in self._plan.patterns if key not in missing]
        for key in keys:
            self._ranks.run(f"{self._phase}, component {key!r}", partial(self._open, key))
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
        present = [name for part in record.parts for name in part.files if self._find(name).is_file()]
        if not present:
            return f"{record.parts[0].files[0]} was deleted"
        reads = self._reads[component.key] = _plan_reads(record, assignment, self._manifest, self._reader)
        self._plan.check_groups(component.key, {part.writer for part in record.parts}, self._ranks.site)
        names = [name for part in reads.parts for name in part.files]
        deleted = [name for name in names if not self._find(name).is_file()]
        return f"{', '.join(deleted)} was deleted" if deleted else None

    def _open(self, key: str) -> None:
        record, reads = self._manifest.component(key), self._reads.get(key)
        if reads is None or record is None:
            return  # It is not declared here, or rank 0 reads it.
        stored = self._stored[key] = []
        for part in reads.parts:
            stored.append(StoredState([self._find(name) for name in part.files], record.format))
            self._files.callback(stored[-1].close)
        if reads.reader is None and not self._is_shared(key):
            self._restores[key] = plan_restore(self._plan.assignments[key].component.stateful, stored[0])

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
            reads = self._reads.get(key)
            reader = ONE_READER if reads is None else reads.reader or ONE_READER
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
                advice = f", or {_fresh_start(record)}" if record is not None else ""
                raise CheckpointError(
                    f"{type(stateful).__name__}.{method}() failed "
                    f"({describe_error(error).removesuffix('.')}). Mend the object{advice}."
                ) from error

        self._ranks.run(what, read)
        if self._is_shared(key):
            stored = list(self._ranks.share(what, stored))
        self._ranks.run(what, put_back)


def _take_up(stateful: Stateful, stored: Sequence[EncodedState], reader: Reader) -> None:
    states = [decode(each.document, each.tensors) for each in stored]
    if len(states) == reader.world_size == 1:
        stateful.load_state_dict(states[0])
    elif is_reshardable(stateful):
        stateful.load_resharded(states, rank=reader.rank, world_size=reader.world_size)
