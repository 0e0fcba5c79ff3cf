"""What a killed job left on the disk: where in a save the kill hit, and whether all that must be there is."""

import json
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kill_job import SAVE_TOTAL_LIMIT, values_in
from safetensors import SafetensorError
from safetensors.torch import load_file

from checkpoint_core import CheckpointError, find_latest_checkpoint
from checkpoint_core.directory import (
    DELETED,
    REPLACED,
    STAGING,
    Leftover,
    checkpoint_directories,
    find_leftovers,
)
from checkpoint_core.loading import StoredState, decode, read_all
from checkpoint_core.manifest import MANIFEST_NAME, Manifest, verify_checkpoint

COMPONENTS = ["model", "shared", "main", "own", "stage"]

Fingerprint = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Save:
    """One save, by what its content says."""

    value: int
    step: int


@dataclass(frozen=True)
class Outcome:
    """What is known of the saves of a life, from what it reported before the kill."""

    resumed: Save | None
    """What was loaded."""
    committed: Save | None
    """The last save that returned on any rank, or what was loaded."""
    pending: Save | None
    """The save that all ranks had begun and none had returned from."""
    during_save: bool
    """Whether any rank was in a save."""
    returned: list[Save] = field(default_factory=list)
    """Every save that returned, in order."""

    @property
    def allowed(self) -> set[int]:
        """Values that the newest checkpoint may say."""
        return {save.value for save in (self.committed, self.pending) if save is not None}


@dataclass
class Directory:
    """One output directory over all lives of the job."""

    path: Path
    writers: int
    """Number of ranks that write here."""
    known: dict[int, int] = field(default_factory=dict)
    """Value of the last committed save of each step."""
    prints: dict[int, tuple[int, Fingerprint]] = field(default_factory=dict)
    """Value and files of each step when it was last looked at."""
    values: dict[int, int] = field(default_factory=dict)
    """What is on the disk now, by step."""

    def audit(self, outcome: Outcome) -> list[str]:
        """Check every checkpoint. Everything wrong is returned, as sentences.

        Args:
            outcome: What the life before reported.
        """
        # A node that was killed before its turn to publish got there when the next life loaded.
        spared = [outcome.resumed] if outcome.resumed is not None else []
        self.known |= {save.step: save.value for save in (*spared, *outcome.returned)}
        wrong: list[str] = []
        found = find_latest_checkpoint(self.path, verify_checksums=True)
        self.values = {}
        for step, path in checkpoint_directories(self.path):
            try:
                self.values[step] = read_value(path, step, self.writers)
            except (CheckpointError, OSError, ValueError) as error:
                wrong.append(f"{path}: {error}")
        on_disk = [step for step, _ in checkpoint_directories(self.path)]
        if found is not None and found.name != f"checkpoint-{on_disk[0]}":
            wrong.append(f"{found} is found, but there is a newer checkpoint-{on_disk[0]}")
        if found is None and (outcome.committed is not None or on_disk):
            wrong.append(f"nothing is found in {self.path}, which holds {on_disk}")
        wrong += self._compare(outcome)
        required = sorted({*self.known, *self.values}, reverse=True)[:SAVE_TOTAL_LIMIT]
        required += [save.step for save in spared]
        if lost := sorted(set(required) - set(on_disk)):
            wrong.append(f"{self.path} lost {lost}, it has {on_disk}")
        # Besides the limit: the one resumed from, and a new one behind which nothing was rotated yet. Jobs
        # killed again and again before their first rotation leave one more each.
        if outcome.returned and len(on_disk) > SAVE_TOTAL_LIMIT + 2:
            wrong.append(f"{self.path} was not rotated: {on_disk}")
        self.known = dict(self.values)
        return wrong

    def _compare(self, outcome: Outcome) -> list[str]:
        wrong = []
        prints = {}
        for step, value in self.values.items():
            pending = outcome.pending is not None and outcome.pending == Save(value, step)
            if value != self.known.get(step) and not pending:
                wrong.append(
                    f"{self.path}: checkpoint-{step} holds {value}, {self.known.get(step)} was committed"
                )
            prints[step] = value, fingerprint(self.path / f"checkpoint-{step}")
            before = self.prints.get(step)
            if before is not None and before[0] == value and before != prints[step]:
                wrong.append(f"{self.path}: checkpoint-{step} was touched")
        self.prints = prints
        return wrong


def fingerprint(checkpoint: Path) -> Fingerprint:
    """Inode, time of the last change, and size of every file."""
    stats = {path.name: path.stat() for path in checkpoint.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}


def read_value(checkpoint: Path, step: int, writers: int) -> int:
    """Verify a checkpoint and read all of it.

    Args:
        checkpoint: The directory.
        step: The step in its name.
        writers: How many ranks write state of their own into it.

    Returns:
        What every tensor and every number in it says.

    Raises:
        CheckpointError: Sizes or checksums do not hold.
        ValueError: Files are missing or too many, the step is another one, or it is a mixture of saves.
    """
    manifest = verify_checkpoint(checkpoint, checksums=True)
    names = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*")}
    if names != {*manifest.files, MANIFEST_NAME}:
        raise ValueError(
            f"files differ from the manifest: {sorted(names ^ {*manifest.files, MANIFEST_NAME})}"
        )
    parts = {record.key: len(record.parts) for record in manifest.components}
    if parts != {key: writers if key == "own" else 1 for key in parts} or set(COMPONENTS) - {"main"} - set(
        parts
    ):
        raise ValueError(f"components are {parts}")
    metrics = json.loads((checkpoint / "eval_metrics.json").read_text())
    values = {*stored_values(checkpoint, manifest), *values_in(dict(manifest.metrics or {}))}
    values.add(float(metrics["eval_loss"]))
    if {manifest.step, metrics["global_step"]} != {step}:
        raise ValueError(f"steps are {manifest.step} and {metrics['global_step']}")
    if len(values) != 1:
        raise ValueError(f"a mixture of saves: {sorted(values)}")
    return int(values.pop())


def stored_values(checkpoint: Path, manifest: Manifest) -> set[float]:
    """All numbers in the components of a checkpoint."""
    found: set[float] = set()
    for record in manifest.components:
        for part in record.parts:
            paths = [checkpoint / name for name in part.files if not name.endswith(".index.json")]
            with closing(StoredState(paths, record.format)) as stored:
                found |= values_in(decode(*read_all(stored, threads=1)))
    return found


def phase_of(directory: Path, outcome: Outcome, pids: Collection[int]) -> str:
    """Where in a save a kill hit, as far as the leftovers tell. To be asked before anything is repaired.

    Args:
        directory: The output directory.
        outcome: What the life reported.
        pids: Its processes; leftovers of earlier lives say nothing of this kill.
    """
    by_kind: Mapping[str, Leftover] = {
        leftover.kind: leftover for leftover in find_leftovers(directory) if leftover.pid in pids
    }
    if not outcome.during_save:
        return "between saves"
    if DELETED in by_kind:
        return "rotation"
    if REPLACED in by_kind:
        final = directory / f"checkpoint-{by_kind[REPLACED].step}"
        return "removal of the replaced one" if final.exists() else "between the two renames"
    if STAGING in by_kind:
        return _phase_of_writing(by_kind[STAGING].path)
    return "after the rename" if _is_committed(directory, outcome.pending) else "before writing"


def _phase_of_writing(staging: Path) -> str:
    files = [path for path in staging.rglob("*") if path.is_file()]
    if not files:
        return "directory made"
    manifest = staging / MANIFEST_NAME
    if manifest.exists():
        with suppress(CheckpointError):
            verify_checkpoint(staging, checksums=True)
            return "manifest complete, no rename yet"
        return "writing the manifest"
    return "fsync, or between files" if all(map(_is_complete, files)) else "writing a file"


def _is_complete(path: Path) -> bool:
    """Whether a file that is being written holds its values already; what is not written is zero."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
            return True
        return 0.0 not in values_in(dict(load_file(path)))
    except (ValueError, SafetensorError):
        return False


def _is_committed(directory: Path, pending: Save | None) -> bool:
    if pending is None:
        return False
    metrics = directory / f"checkpoint-{pending.step}" / "eval_metrics.json"
    return metrics.exists() and json.loads(metrics.read_text())["eval_loss"] == pending.value
