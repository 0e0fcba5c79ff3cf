"""One save: the state of each component is captured, divided into files, written and committed."""

import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.background import StagingBuffer
from checkpoint_core.components import Plan, SharingPattern, Stateful
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory import (
    check_new,
    check_other_runs,
    check_space,
    check_target,
    checkpoint_path,
    clean_leftovers,
    create_staging,
    discard,
    publish,
)
from checkpoint_core.encoding import EncodedState, LocalPart, encode_state, join_path, local_part
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import (
    FileRecord,
    combine,
    json_bytes,
    range_share,
    sync_directories,
    sync_file,
    write_bytes,
)
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.manifest import (
    MANIFEST_NAME,
    STATE_FORMAT,
    WEIGHTS_FORMAT,
    ComponentPart,
    ComponentRecord,
    Manifest,
    current_versions,
    metrics_document,
    parse_metrics,
)
from checkpoint_core.model_state import ModelState, OptimizerState, config_bytes
from checkpoint_core.replication import Replica, find_mismatches
from checkpoint_core.sharded import WholeState, join_states
from checkpoint_core.shared_files import (
    RankReport,
    Shares,
    begin_save,
    check_one_writer,
    gather_reports,
    needs_one_writer,
    write_exchanged_files,
    write_own_files,
)
from checkpoint_core.store_path import locate
from checkpoint_core.tensor_files import (
    MODEL_STEM,
    FileLayout,
    create_tensor_file,
    divide_tensors,
    plan_file,
    plan_weight_shards,
    shard_names,
    spec_of,
    write_parts,
)
from checkpoint_core.tensor_owners import WholeFiles, assign_owners

_logger = logging.getLogger(__name__)
METRICS_NAME = "eval_metrics.json"


def capture(stateful: Stateful, *, sharded: bool) -> EncodedState:
    """Take the state out of a component.

    Args:
        stateful: The component's object. A :class:`ModelState` is stored as Hugging Face weights, anything
            else as a JSON document with a tensor file where there are tensors.
        sharded: Whether the ranks hold parts of one state, so that DTensors are in place.

    Returns:
        The state, whose tensors share memory with the live one.

    Raises:
        CheckpointError: The state holds something that cannot be stored; names the place.
    """
    state: object = stateful.state_dict()
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{type(stateful).__name__}.state_dict() returned a {type(state).__name__}, not a dict, which "
            "could not be loaded again. Wrap it in a dict."
        )
    tensor_name = OptimizerState.tensor_name if isinstance(stateful, OptimizerState) else join_path
    encoded = encode_state(state, tensor_name=tensor_name, sharded=sharded)
    if not isinstance(stateful, ModelState):
        return encoded
    nodes = encoded.document.items() if isinstance(encoded.document, dict) else ()
    shared = {str(key): str(node["name"]) for key, node in nodes if node["name"] != key}
    tied = {**shared, **stateful.tied}
    own = {name: tensor for name, tensor in encoded.tensors.items() if name not in tied}
    # Parts of a model have different names on each rank, and no document is stored for weights.
    return EncodedState(None if sharded else encoded.document, own, tied)


def own_state(captured: EncodedState) -> WholeState:
    """The state of a component of which one rank holds and writes everything."""
    return WholeState(
        specs={name: spec_of(tensor) for name, tensor in captured.tensors.items()},
        document=captured.document,
        tied=captured.tied,
        parts={name: local_part(tensor, name) for name, tensor in captured.tensors.items()},
    )


@dataclass(frozen=True)
class ComponentFiles:
    """The files of one component."""

    format: str
    layouts: Mapping[str, FileLayout]
    """The safetensors files, by name."""
    documents: Mapping[str, bytes]
    """Content of the other files that reading needs."""
    companions: Mapping[str, bytes]
    """Content of files for other programs, which reading does not need."""
    tied: Mapping[str, str]
    """Name of the stored tensor, by alias."""
    parts: Mapping[str, LocalPart]
    """What this rank writes, by tensor name."""
    whole: WholeFiles | None = None
    """Of a SHARDED state: which rank writes which file, where ranks cannot write to ranges of one."""

    @property
    def names(self) -> list[str]:
        """Names of the files that reading needs."""
        return [*self.documents, *self.layouts]

    def size(self, owners: Collection[int] | None = None) -> int:
        """Bytes on disk.

        Args:
            owners: Count tensor files of these owners only; None counts all.
        """
        texts = (*self.documents.values(), *self.companions.values())
        sizes = [layout.size for layout in self.layouts.values()]
        if self.whole is not None and owners is not None:
            pairs = zip(sizes, self.whole.owners, strict=False)
            sizes = [size for size, owner in pairs if owner in owners]
        return sum(map(len, texts)) + sum(sizes)

    def create(self, directory: Path) -> Shares:
        """Make the files, complete but for the tensors. Called by one rank.

        Tensor files that have an owner are made by it, in :meth:`write` or :meth:`exchange`.

        Args:
            directory: Where; none of the files may exist.

        Returns:
            What was written of each file.
        """
        shares: Shares = {}
        for name, layout in self.layouts.items() if self.whole is None else ():
            shares[name] = (layout.size, create_tensor_file(directory / name, layout))
        for name, text in {**self.documents, **self.companions}.items():
            shares[name] = (len(text), write_bytes(directory / name, text))
        return shares

    def write(self, directory: Path, threads: int, rank: int = 0) -> Shares:
        """Write the tensors of this rank into the files, and sync them to the disk.

        Args:
            directory: Where the files are.
            threads: How many threads write.
            rank: This rank, which may own files.

        Returns:
            What was written of each file. Files of which other ranks hold parts follow in :meth:`exchange`.
        """
        if self.whole is not None:
            if self.whole.need_exchange:
                return {}
            return write_own_files(directory, self.layouts, self.whole, self.parts, rank, threads)
        return {
            name: (layout.size, write_parts(directory / name, layout, self.parts, threads))
            for name, layout in self.layouts.items()
        }

    def exchange(self, ranks: RankAgreement, phase: str, directory: Path) -> list[Shares]:
        """Write the files of which other ranks than the owner hold parts. Collective.

        Args:
            ranks: The ranks.
            phase: What is being done, for messages.
            directory: Where.

        Returns:
            What each rank has written of each file.

        Raises:
            CheckpointError: On every rank, when any failed.
        """
        if self.whole is None or not self.whole.need_exchange:
            return []
        return write_exchanged_files(ranks, phase, directory, self.layouts, self.whole, self.parts)


def plan_files(
    stateful: Stateful,
    stem: str,
    state: WholeState,
    max_shard_size: int,
    owned: WholeFiles | None = None,
) -> ComponentFiles:
    """Divide a state into files.

    Args:
        stateful: The component's object.
        stem: Beginning of the file names.
        state: Its state, complete.
        max_shard_size: Bytes of tensor data per file of weights.
        owned: Which rank writes which file, where each has one writer.

    Returns:
        The files, the same on every rank but for the parts.
    """
    if not isinstance(stateful, ModelState):
        groups = [state.specs] if owned is None else owned.shards
        names = shard_names(stem, len(groups))
        layouts = {name: plan_file(group, {}) for name, group in zip(names, groups, strict=True) if group}
        documents = {f"{stem}.json": json_bytes(state.document)}
        return ComponentFiles(STATE_FORMAT, layouts, documents, {}, {}, state.parts, owned)
    shards = divide_tensors(state.specs, max_shard_size) if owned is None else owned.shards
    layouts, companions = plan_weight_shards(shards, stem, state.tied)
    if stem == MODEL_STEM and stateful.parts and (config := config_bytes(stateful.parts[0])) is not None:
        companions["config.json"] = config
    return ComponentFiles(WEIGHTS_FORMAT, layouts, {}, companions, state.tied, state.parts, owned)


def capture_all(ranks: RankAgreement, plan: Plan) -> dict[str, EncodedState]:
    """Take the state out of all components of this rank.

    Raises:
        CheckpointError: A state cannot be stored; names component and place.
    """
    captured: dict[str, EncodedState] = {}
    for key, assignment in plan.assignments.items():
        pattern = assignment.component.sharing_pattern
        if pattern is SharingPattern.GLOBAL and ranks.rank != 0:
            continue
        # Every replica is asked, because taking the state may itself need all ranks.
        sharded = pattern is SharingPattern.SHARDED
        try:
            captured[key] = capture(assignment.component.stateful, sharded=sharded)
        except Exception as error:
            raise CheckpointError(f"component {key!r}: {describe_error(error)}") from error
    return captured


def divide_into_files(
    ranks: RankAgreement,
    phase: str,
    plan: Plan,
    captured: Mapping[str, EncodedState],
    config: CheckpointConfig,
    *,
    one_writer: bool = False,
    owners: Collection[int] | None = None,
) -> dict[str, ComponentFiles]:
    """The files that this rank makes, or writes a part of, by component. Collective.

    With ``one_writer`` each file is written by one rank, of ``owners`` where they are given.

    Raises:
        CheckpointError: On every rank, when any failed.
    """
    sharded = {key: captured[key] for key in plan.sharded}
    joined = join_states(ranks, phase, sharded, config.on_replica_mismatch)
    owned = assign_owners(ranks, phase, joined, config.max_shard_size, owners) if one_writer else {}
    files: dict[str, ComponentFiles] = {}

    def divide() -> None:
        for key, assignment in plan.assignments.items():
            if key in joined or assignment.writer == ranks.rank:
                stateful = assignment.component.stateful
                try:
                    whole = joined[key] if key in joined else own_state(captured[key])
                    files[key] = plan_files(
                        stateful, assignment.stem, whole, config.max_shard_size, owned.get(key)
                    )
                except CheckpointError as error:
                    raise CheckpointError(f"component {key!r}: {error}") from error

    ranks.run(phase, divide)
    return files


class Preprocessor(Protocol):
    """What is saved beside the weights: a tokenizer or processor."""

    def save_pretrained(self, directory: str, /) -> object:
        """Write own files into a directory."""
        ...


@dataclass(kw_only=True)
class CheckpointSave:
    """The save of one step: :meth:`capture` while the training waits, then :meth:`commit`, on any thread."""

    config: CheckpointConfig
    ranks: RankAgreement
    plan: Plan
    step: int
    path: Path | None
    """A new directory of its own for it; None for the checkpoint of the step."""
    run_id: str
    metrics: Mapping[str, float] | None
    """Metrics to store; those of rank 0, once captured."""
    preprocessor: Preprocessor | None
    lease: DirectoryLease | None
    """Which the leader must hold to write; None asks for none."""
    local_world_size: int = 1
    """Number of ranks on this host."""

    def __post_init__(self) -> None:
        """Name the checkpoint."""
        output_dir = locate(self.config.output_dir)
        self.final = checkpoint_path(output_dir, self.step) if self.path is None else self.path.absolute()
        self._phase = f"saving {self.final.name}"
        self._save_id = ""
        self._staging: Path | None = None
        self._files: dict[str, ComponentFiles] = {}
        self._made: Shares = {}

    def capture(self, staging: StagingBuffer | None = None) -> None:
        """Take the state of all components, and compare replicas. Collective.

        Args:
            staging: Where to copy what this rank will write; None writes from the live state.

        Raises:
            CheckpointError: On every rank, when any failed.
        """
        captured: dict[str, EncodedState] = {}

        def take() -> dict[str, object] | None:
            captured.update(capture_all(self.ranks, self.plan))
            return None if self.metrics is None else metrics_document(self.metrics)

        metrics = self.ranks.run(self._phase, take)[0]
        self.metrics = None if metrics is None else parse_metrics(metrics)
        self._check_replicas(captured)
        self._files = self._divide(captured)
        if staging is not None:
            self.ranks.run(self._phase, lambda: self._stage(staging))

    def commit(self) -> Path:
        """Write what was captured and make it appear. Collective; called once, after :meth:`capture`.

        Returns:
            The committed checkpoint.

        Raises:
            CheckpointError: On every rank, when any failed. Nothing is left behind then.
        """
        ranks, phase = self.ranks, self._phase
        try:
            sizes = ranks.run(phase, lambda: (self._size(), "" if ranks.rank else uuid.uuid4().hex))
            self._save_id = sizes[0][1]
            self._write_all(sum(sizes[rank][0] for rank in ranks.node))
        except BaseException:
            self._discard()
            raise
        return self.final

    def _divide(self, captured: Mapping[str, EncodedState]) -> dict[str, ComponentFiles]:
        one_writer = bool(self.plan.sharded) and needs_one_writer(
            self.ranks,
            self._phase,
            self.final.parent,
            self.config.one_writer_per_file,
            self.local_world_size,
        )
        return divide_into_files(
            self.ranks, self._phase, self.plan, captured, self.config, one_writer=one_writer
        )

    def _write_all(self, needed: int) -> None:
        ranks, phase = self.ranks, self._phase
        staging = begin_save(ranks, phase, self.final.parent, lambda: self._begin(needed))
        reports = gather_reports(ranks, phase, lambda: self._write(staging))
        # In the order that all ranks know: each may declare its components in another one.
        for key in self.plan.sharded:
            written = self._files[key].exchange(ranks, f"{phase}, component {key!r}", staging)
            for report, shares in zip(reports, written, strict=False):
                _add(report["files"], shares)
        ranks.run_on_leaders(phase, lambda: self._write_manifest(staging, reports))
        # Every node has all of its files before the first one publishes.
        ranks.run_on_leaders(phase, lambda: self._publish(staging))

    def _discard(self) -> None:
        # Only a leader has made it, and by now no rank writes into it any more. When a rank was lost, another
        # node may have published, and the next load needs this one's files to do the same.
        if self._staging is not None and not (self.ranks.broken and len(self.ranks.nodes()) > 1):
            discard(self._staging)

    def _check_replicas(self, captured: Mapping[str, EncodedState]) -> None:
        replicas = [
            Replica(key, component.validation_level, assignment.holders, captured[key])
            for key, assignment in self.plan.assignments.items()
            if (component := assignment.component).validate_replication
            and component.validation_level != "none"
        ]
        messages = find_mismatches(self.ranks, self._phase, replicas) if self.plan.validates else []
        if messages and self.config.on_replica_mismatch == "error":
            raise CheckpointError(f"{self._phase}: {'; '.join(messages)}")
        if self.ranks.rank == 0:
            for message in messages:
                _logger.warning("%s: %s", self._phase, message)

    def _stage(self, staging: StagingBuffer) -> None:
        live = {
            (key, name): part.data for key, files in self._files.items() for name, part in files.parts.items()
        }
        staged: dict[tuple[str, str], torch.Tensor] = staging.copy(live)
        for key, files in self._files.items():
            parts = {name: replace(part, data=staged[key, name]) for name, part in files.parts.items()}
            self._files[key] = replace(files, parts=parts)

    def _makes(self, key: str) -> bool:
        """Whether this rank makes the files of a component."""
        return self.plan.assignments[key].writer == self.ranks.rank

    def _size(self) -> int:
        """Bytes that go to the disk of this node, of the files that this rank makes or, as its leader, whose
        owners it leads."""
        leads = self.ranks.is_leader
        return sum(
            files.size(self.ranks.node)
            for key, files in self._files.items()
            if self._makes(key) or (leads and files.whole is not None)
        )

    def _publish(self, staging: Path) -> None:
        # Once more: writing may have taken long, and another run may have taken the directory over meanwhile.
        self._check_lease()
        publish(staging, self.final, self.step)

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _begin(self, needed: int) -> str:
        self._check_lease()
        if self.path is not None:
            check_new(self.final, locate(self.config.output_dir), self.step)
        else:
            check_target(self.final, self.run_id)
            check_other_runs(self.final.parent, self.step, self.run_id)
        clean_leftovers(self.final.parent)
        check_space(self.final.parent, needed)
        self._staging = create_staging(self.final.parent, self.step)
        if self.ranks.rank != self.ranks.site.start:
            return self._staging.name  # What follows is kept once, by the first node.
        # First, so that a file of the preprocessor never replaces one of ours: ours are made with O_EXCL.
        if self.preprocessor is not None:
            self._made |= save_preprocessor(self.preprocessor, self._staging)
        for key in self.plan.sharded:
            self._made |= self._files[key].create(self._staging)
        if self.metrics is not None:
            content = json_bytes({**metrics_document(self.metrics), "global_step": self.step})
            self._made[METRICS_NAME] = (len(content), write_bytes(self._staging / METRICS_NAME, content))
        return self._staging.name

    def _write(self, staging: Path) -> RankReport:
        if not staging.is_dir():
            raise CheckpointError(
                f"this rank does not see {staging}, which rank {self.ranks.leader} made. Put output_dir on "
                "storage that all ranks share, under the same path, or set save_on_each_node=True."
            )
        report = RankReport(components={}, files=dict(self._made))
        for key, files in self._files.items():
            if self._makes(key):
                report["components"][key] = (files.names, files.format, dict(files.tied))
                if key not in self.plan.sharded:
                    _add(report["files"], files.create(staging))
            _add(report["files"], files.write(staging, self.ranks.threads, self.ranks.rank))
        return report

    def _write_manifest(self, staging: Path, reports: Sequence[RankReport]) -> None:
        if self.ranks.is_spread:
            check_one_writer(reports)
        write_bytes(staging / MANIFEST_NAME, self._manifest(reports).to_bytes())
        # Once another node has published, this one must be able to, even after a power cut.
        sync_directories(staging)

    def _manifest(self, reports: Sequence[RankReport]) -> Manifest:
        site = {rank: reports[rank] for rank in self.ranks.site}
        files: Shares = {}
        for each in site.values():
            _add(files, each["files"])
        components = []
        tied: dict[str, Mapping[str, str]] = {}
        for key, pattern in self.plan.patterns.items():
            written = {
                rank: each["components"][key] for rank, each in site.items() if key in each["components"]
            }
            if not written:
                continue  # A GLOBAL component of another node.
            parts = [ComponentPart(rank, names) for rank, (names, _, _) in written.items()]
            _, kind, _ = next(iter(written.values()))
            components.append(ComponentRecord(key, pattern.value, kind, parts))
            if aliases := next((aliases for _, _, aliases in written.values() if aliases), None):
                tied[key] = aliases
        return Manifest(
            step=self.step,
            world_size=self.ranks.world_size,
            run_id=self.run_id,
            save_id=self._save_id,
            components=components,
            files={name: FileRecord(size, combine([share])) for name, (size, share) in sorted(files.items())},
            tied_weights=tied,
            metrics=self.metrics,
            versions=current_versions(),
            nodes=len(self.ranks.nodes()) if self.ranks.is_spread else 1,
        )


def save_preprocessor(preprocessor: Preprocessor, directory: Path) -> Shares:
    """Let a tokenizer or processor write its files.

    Args:
        preprocessor: The tokenizer or processor.
        directory: Where.

    Returns:
        Size and checksum of each new file, by path relative to the directory.

    Raises:
        CheckpointError: It failed, or made something that a checkpoint cannot hold.
    """
    kind = type(preprocessor).__name__
    before = set(directory.rglob("*"))
    try:
        preprocessor.save_pretrained(str(directory))
    except Exception as error:
        raise CheckpointError(f"the preprocessor {kind} cannot be saved: {describe_error(error)}") from error
    shares: Shares = {}
    for path in sorted(set(directory.rglob("*")) - before):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()) or "\\" in name:
            raise CheckpointError(
                f"the preprocessor {kind} made {name!r}, but a checkpoint holds plain files and "
                "directories, no links, under names without a backslash. Let save_pretrained() write a "
                "file of another name."
            )
        if path.is_file():
            sync_file(path)
            size = path.stat().st_size
            shares[name] = (size, range_share(path, 0, size, size))
    return shares


def _add(shares: Shares, more: Shares) -> None:
    """Take further shares into a table; those of one file add up."""
    for name, (size, share) in more.items():
        shares[name] = (size, shares[name][1] ^ share if name in shares else share)
