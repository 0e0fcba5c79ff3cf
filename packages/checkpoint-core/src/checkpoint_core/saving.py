"""One save, from the declared components to the committed checkpoint."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypedDict

import torch

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.component_files import (
    CapturedState,
    ComponentFiles,
    Shares,
    capture,
    join_states,
    own_state,
    plan_files,
)
from checkpoint_core.components import Plan, SharingPattern
from checkpoint_core.config import CheckpointConfig
from checkpoint_core.directory.commit import (
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
from checkpoint_core.directory.lease import DirectoryLease
from checkpoint_core.directory.manifest import (
    MANIFEST_NAME,
    ComponentPart,
    ComponentRecord,
    Manifest,
    current_versions,
    metrics_document,
    parse_metrics,
)
from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.replication import Replica, find_mismatches
from checkpoint_core.staging import StagingBuffer
from checkpoint_core.storage.files import (
    FileRecord,
    checksum_file,
    combine,
    json_bytes,
    sync_directories,
    sync_file,
    write_bytes,
)

_logger = logging.getLogger(__name__)
METRICS_NAME = "eval_metrics.json"


class Preprocessor(Protocol):
    """What is saved beside the weights: a tokenizer or processor."""

    def save_pretrained(self, directory: str, /) -> object:
        """Write own files into a directory."""
        ...


class _PartReport(TypedDict):
    files: list[str]
    format: str
    tied: dict[str, str]


class _RankReport(TypedDict):
    """What one rank wrote."""

    components: dict[str, _PartReport]
    files: dict[str, tuple[int, int]]


class CheckpointSave:
    """The save of one step: :meth:`capture` while the training waits, then :meth:`commit`, on any thread.

    Args:
        config: Where and how.
        ranks: The ranks that save together.
        plan: Who writes what.
        step: The step.
        path: A new directory of its own for it; None for the checkpoint of the step.
        run_id: The id of this run.
        metrics: Metrics to store; rank 0's are used.
        preprocessor: Saved beside the weights.
        lease: Which the leader must hold to write; None asks for none.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        ranks: RankAgreement,
        plan: Plan,
        *,
        step: int,
        path: Path | None,
        run_id: str,
        metrics: Mapping[str, float] | None,
        preprocessor: Preprocessor | None,
        lease: DirectoryLease | None,
    ) -> None:
        self.metrics = metrics
        self.stands_apart = path is not None
        self.final = checkpoint_path(Path(config.output_dir), step) if path is None else path.absolute()
        self._config = config
        self._ranks = ranks
        self._plan = plan
        self._step = step
        self._run_id = run_id
        self._preprocessor = preprocessor
        self._lease = lease
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
        captured: dict[str, CapturedState] = {}
        metrics = self._ranks.run(self._phase, lambda: self._capture(captured))[0]
        self.metrics = None if metrics is None else parse_metrics(metrics)
        self._check_replicas(captured)
        self._plan_files(captured)
        if staging is not None:
            self._ranks.run(self._phase, lambda: self._stage(staging))

    def commit(self) -> Path:
        """Write what was captured and make it appear. Collective; called once, after :meth:`capture`.

        Returns:
            The committed checkpoint.

        Raises:
            CheckpointError: On every rank, when any failed. Nothing is left behind then.
        """
        ranks, phase = self._ranks, self._phase
        try:
            sizes = ranks.run(phase, lambda: (self._size(), uuid.uuid4().hex))
            self._save_id = sizes[0][1]
            needed = sum(sizes[rank][0] for rank in ranks.site)
            staging = self.final.parent / ranks.run_on_leaders(phase, lambda: self._begin(needed))
            reports = ranks.run(phase, lambda: self._write(staging))
            ranks.run_on_leaders(phase, lambda: self._write_manifest(staging, reports))
            # Every node has all of its files before the first one publishes.
            ranks.run_on_leaders(phase, lambda: self._publish(staging))
        except BaseException:
            # Only a leader has made it, and by now no rank writes into it any more. When a rank was lost,
            # another node may have published, and the next load needs this one's files to do the same.
            if self._staging is not None and not (ranks.broken and len(ranks.sites()) > 1):
                discard(self._staging)
            raise
        return self.final

    def _capture(self, captured: dict[str, CapturedState]) -> dict[str, object] | None:
        for key, assignment in self._plan.assignments.items():
            pattern = assignment.component.sharing_pattern
            if pattern is SharingPattern.GLOBAL and self._ranks.rank != 0:
                continue
            # Every replica is asked, because taking the state may itself need all ranks.
            sharded = pattern is SharingPattern.SHARDED
            try:
                captured[key] = capture(assignment.component.stateful, assignment.stem, sharded=sharded)
            except Exception as error:
                raise CheckpointError(f"component {key!r}: {describe_error(error)}") from error
        return None if self.metrics is None else metrics_document(self.metrics)

    def _check_replicas(self, captured: Mapping[str, CapturedState]) -> None:
        replicas = [
            Replica(key, component.validation_level, assignment.holders, captured[key].encoded)
            for key, assignment in self._plan.assignments.items()
            if (component := assignment.component).validate_replication
            and component.validation_level != "none"
        ]
        messages = find_mismatches(self._ranks, self._phase, replicas) if self._plan.validates else []
        if messages and self._config.on_replica_mismatch == "error":
            raise CheckpointError(f"{self._phase}: {'; '.join(messages)}")
        if self._ranks.rank == 0:
            for message in messages:
                _logger.warning("%s: %s", self._phase, message)

    def _plan_files(self, captured: Mapping[str, CapturedState]) -> None:
        sharded = {key: captured[key] for key in self._plan.sharded}
        global_states = join_states(self._ranks, self._phase, sharded, self._config.on_replica_mismatch)

        def divide() -> None:
            for key, assignment in self._plan.assignments.items():
                if key in global_states or assignment.writer == self._ranks.rank:
                    whole = global_states[key] if key in global_states else own_state(captured[key])
                    try:
                        self._files[key] = plan_files(whole, assignment.stem, self._config.max_shard_size)
                    except CheckpointError as error:
                        raise CheckpointError(f"component {key!r}: {error}") from error

        self._ranks.run(self._phase, divide)

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
        return self._plan.assignments[key].writer == self._ranks.rank

    def _size(self) -> int:
        return sum(files.size for key, files in self._files.items() if self._makes(key))

    def _publish(self, staging: Path) -> None:
        # Once more: writing may have taken long, and another run may have taken the directory over meanwhile.
        self._check_lease()
        publish(staging, self.final, self._step)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _begin(self, needed: int) -> str:
        self._check_lease()
        if self.stands_apart:
            check_new(self.final, Path(self._config.output_dir), self._step)
        else:
            check_target(self.final, self._run_id)
            check_other_runs(self.final.parent, self._step, self._run_id)
        clean_leftovers(self.final.parent)
        check_space(self.final.parent, needed)
        self._staging = create_staging(self.final.parent, self._step)
        # First, so that a file of the preprocessor never replaces one of ours: ours are made with O_EXCL.
        if self._preprocessor is not None:
            for name, record in save_preprocessor(self._preprocessor, self._staging).items():
                self._made[name] = _share(record)
        for key in self._plan.sharded:
            self._made |= self._files[key].create(self._staging)
        if self.metrics is not None:
            content = json_bytes({**metrics_document(self.metrics), "global_step": self._step})
            self._made[METRICS_NAME] = _share(write_bytes(self._staging / METRICS_NAME, content))
        return self._staging.name

    def _write(self, staging: Path) -> _RankReport:
        if not staging.is_dir():
            raise CheckpointError(
                f"this rank does not see {staging}, which rank {self._ranks.leader} made. Put output_dir on "
                "storage that all ranks share, under the same path, or set save_on_each_node=True."
            )
        report = _RankReport(components={}, files=dict(self._made))
        for key, files in self._files.items():
            if self._makes(key):
                part = _PartReport(files=files.names, format=files.format, tied=dict(files.tied))
                report["components"][key] = part
                if key not in self._plan.sharded:
                    _add(report["files"], files.create(staging))
            _add(report["files"], files.write(staging, self._ranks.threads))
        return report

    def _write_manifest(self, staging: Path, reports: Sequence[_RankReport]) -> None:
        write_bytes(staging / MANIFEST_NAME, self._manifest(reports).to_bytes())
        # Once another node has published, this one must be able to, even after a power cut.
        sync_directories(staging)

    def _manifest(self, reports: Sequence[_RankReport]) -> Manifest:
        site = {rank: reports[rank] for rank in self._ranks.site}
        components = []
        tied: dict[str, Mapping[str, str]] = {}
        for key, pattern in self._plan.patterns.items():
            written = {
                rank: each["components"][key] for rank, each in site.items() if key in each["components"]
            }
            if not written:
                continue  # A GLOBAL component of another node.
            parts = [ComponentPart(writer=rank, files=part["files"]) for rank, part in written.items()]
            kind = next(iter(written.values()))["format"]
            components.append(ComponentRecord(key=key, pattern=pattern.value, format=kind, parts=parts))
            if aliases := next((part["tied"] for part in written.values() if part["tied"]), None):
                tied[key] = aliases
        return Manifest(
            step=self._step,
            world_size=self._ranks.world_size,
            run_id=self._run_id,
            save_id=self._save_id,
            components=components,
            files=_records(list(site.values())),
            tied_weights=tied,
            metrics=self.metrics,
            versions=current_versions(),
        )


def save_preprocessor(preprocessor: Preprocessor, directory: Path) -> dict[str, FileRecord]:
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
    records = {}
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
            records[name] = checksum_file(path)
    return records


def _share(record: FileRecord) -> tuple[int, int]:
    return record.size, int(record.checksum, 16)


def _add(shares: Shares, more: Shares) -> None:
    """Take further shares into a table; those of one file add up."""
    for name, (size, share) in more.items():
        shares[name] = (size, shares[name][1] ^ share if name in shares else share)


def _records(reports: Sequence[_RankReport]) -> dict[str, FileRecord]:
    total: Shares = {}
    for report in reports:
        _add(total, {name: (size, share) for name, (size, share) in report["files"].items()})
    return {name: FileRecord(size, combine([share])) for name, (size, share) in sorted(total.items())}
