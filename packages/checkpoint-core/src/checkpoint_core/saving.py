"""One save, from the declared components to the committed checkpoint."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypedDict

from checkpoint_core.agreement import RankAgreement
from checkpoint_core.commit import (
    check_space,
    check_target,
    checkpoint_path,
    clean_leftovers,
    create_staging,
    discard,
    publish,
)
from checkpoint_core.components import SharingPattern
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import FileRecord, checksum_file, json_bytes, sync_file, write_bytes
from checkpoint_core.manifest import (
    MANIFEST_NAME,
    ComponentPart,
    ComponentRecord,
    Manifest,
    current_versions,
    metrics_document,
)
from checkpoint_core.plan import Plan
from checkpoint_core.storage import CapturedState, capture

_logger = logging.getLogger(__name__)
METRICS_NAME = "eval_metrics.json"


class Preprocessor(Protocol):
    """What is saved beside the weights: a tokenizer or processor."""

    def save_pretrained(self, directory: str, /) -> object:
        """Write own files into a directory."""
        ...


class _FileReport(TypedDict):
    size: int
    checksum: str


class _PartReport(TypedDict):
    files: list[str]
    format: str
    tied: dict[str, str]


class _RankReport(TypedDict):
    """What one rank wrote."""

    components: dict[str, _PartReport]
    files: dict[str, _FileReport]


class CheckpointSave:
    """The save of one step.

    Args:
        output_dir: The directory of the checkpoints.
        ranks: The ranks that save together.
        plan: Who writes what.
        step: The step.
        run_id: The id of this run.
        max_shard_size: Bytes of tensor data per file of weights.
        metrics: Metrics to store; rank 0's are used.
        preprocessor: Saved beside the weights by rank 0.
    """

    def __init__(
        self,
        output_dir: Path,
        ranks: RankAgreement,
        plan: Plan,
        *,
        step: int,
        run_id: str,
        max_shard_size: int,
        metrics: Mapping[str, float] | None,
        preprocessor: Preprocessor | None,
    ) -> None:
        self._output_dir = output_dir
        self._ranks = ranks
        self._plan = plan
        self._step = step
        self._run_id = run_id
        self._max_shard_size = max_shard_size
        self._metrics = metrics
        self._preprocessor = preprocessor
        self._final = checkpoint_path(output_dir, step)
        self._staging: Path | None = None
        self._captured: dict[str, CapturedState] = {}
        self._companions: dict[str, FileRecord] = {}

    def run(self) -> Path:
        """Save. Collective; called once.

        Returns:
            The committed checkpoint.

        Raises:
            CheckpointError: On every rank, when any failed. Nothing is left behind then.
        """
        phase = f"saving {self._final.name}"
        try:
            sizes = self._ranks.run(phase, self._capture)
            staging = self._output_dir / self._ranks.run_on_main(phase, lambda: self._begin(sum(sizes)))
            reports = self._ranks.run(phase, lambda: self._write(staging))
            self._ranks.run_on_main(phase, lambda: self._commit(staging, reports))
        except BaseException:
            # Only rank 0 has made it, and by now no rank writes into it any more.
            if self._staging is not None:
                discard(self._staging)
            raise
        return self._final

    def _capture(self) -> int:
        for key, assignment in self._plan.assignments.items():
            component, writes = assignment.component, assignment.writer == self._ranks.rank
            if not writes and component.sharing_pattern is SharingPattern.GLOBAL:
                continue
            # Every replica is asked, because taking the state may itself need all ranks.
            try:
                captured = capture(component.stateful, assignment.stem, self._max_shard_size)
            except CheckpointError as error:
                raise CheckpointError(f"component {key!r}: {error}") from error
            if writes:
                self._captured[key] = captured
        return sum(captured.size for captured in self._captured.values())

    def _begin(self, needed: int) -> str:
        check_target(self._final, self._run_id)
        clean_leftovers(self._output_dir)
        check_space(self._output_dir, needed)
        self._staging = create_staging(self._output_dir, self._step)
        if self._metrics is not None:
            content = json_bytes({**metrics_document(self._metrics), "global_step": self._step})
            self._companions[METRICS_NAME] = write_bytes(self._staging / METRICS_NAME, content)
        if self._preprocessor is not None:
            self._companions.update(save_preprocessor(self._preprocessor, self._staging))
        return self._staging.name

    def _write(self, staging: Path) -> _RankReport:
        if not staging.is_dir():
            raise CheckpointError(
                f"this rank does not see {staging}, which rank 0 made; output_dir must be on storage that "
                "all ranks share, under the same path"
            )
        report = _RankReport(components={}, files={})
        for key, captured in self._captured.items():
            for name, record in captured.write(staging).items():
                report["files"][name] = _FileReport(size=record.size, checksum=record.checksum)
            report["components"][key] = _PartReport(
                files=captured.files, format=captured.format, tied=dict(captured.tied)
            )
        return report

    def _commit(self, staging: Path, reports: Sequence[_RankReport]) -> None:
        manifest = self._manifest(reports)
        for name, record in manifest.files.items():
            size = (staging / name).stat().st_size
            if size != record.size:
                raise CheckpointError(
                    f"{name} has {size} bytes as rank 0 sees it, {record.size} were written"
                )
        write_bytes(staging / MANIFEST_NAME, manifest.to_bytes())
        publish(staging, self._final, self._step)
        _logger.info("saved %s", self._final)

    def _manifest(self, reports: Sequence[_RankReport]) -> Manifest:
        components = []
        tied: dict[str, dict[str, str]] = {}
        for key, pattern in self._plan.patterns.items():
            parts = {rank: r["components"][key] for rank, r in enumerate(reports) if key in r["components"]}
            for part in parts.values():
                if part["tied"]:
                    tied.setdefault(key, {}).update(part["tied"])
            storage_format = next(iter(parts.values()))["format"]
            records = [ComponentPart(rank, part["files"]) for rank, part in parts.items()]
            components.append(ComponentRecord(key, pattern.value, storage_format, records))
        files = dict(self._companions)
        for report in reports:
            files.update({name: FileRecord(**record) for name, record in report["files"].items()})
        return Manifest(
            step=self._step,
            world_size=self._ranks.world_size,
            run_id=self._run_id,
            components=components,
            files=files,
            tied_weights=tied,
            metrics=None if self._metrics is None else dict(self._metrics),
            versions=current_versions(),
        )


def save_preprocessor(preprocessor: Preprocessor, directory: Path) -> dict[str, FileRecord]:
    """Let a preprocessor write its files, and make them durable.

    Args:
        preprocessor: The tokenizer or processor.
        directory: A directory that holds only files of ours.

    Returns:
        Size and checksum of each new file, by path relative to the directory.
    """
    before = set(directory.rglob("*"))
    preprocessor.save_pretrained(str(directory))
    records = {}
    for path in sorted(set(directory.rglob("*")) - before):
        if path.is_file():
            sync_file(path)
            records[path.relative_to(directory).as_posix()] = checksum_file(path)
    return records
