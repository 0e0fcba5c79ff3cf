"""``ls``, ``verify`` and ``prune``: the checkpoints of a directory, their state, and which of them may go."""

import io
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint_core.config import lower_is_better
from checkpoint_core.directory import (
    DELETED,
    REPLACED,
    Leftover,
    checkpoint_directories,
    find_leftovers,
    remove_checkpoint,
)
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import FileRecord, checksum_file, read_json
from checkpoint_core.lease import DirectoryLease
from checkpoint_core.manifest import MANIFEST_NAME, SPREAD_SCHEMA_VERSION, Manifest, read_manifest
from checkpoint_core.store_directory import marked_directory
from checkpoint_core.store_path import StorePath, file_sizes
from dist_env import printable, size_text

_WIDEST = 100_000
_AGES = (("d", 86400), ("h", 3600), ("min", 60))


def age_text(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def number_text(value: float) -> str:
    """An integer in full, any other number with six significant digits."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under a header. On a terminal, cells wrap so that lines fit; elsewhere nothing wraps."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in table_lines(header, rows, width):
        print(line)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of a table, without blanks at the end.

    Args:
        header: Names of the columns.
        rows: The cells.
        width: Columns to fit into; None for as wide as needed.
    """
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    text = io.StringIO()
    Console(file=text, width=width or _WIDEST, color_system=None).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]


_NAME = re.compile(r"checkpoint-(\d+)")
_HEADER = ("step", "age", "size", "ranks", "metrics", "state")
_PICKLES = {".bin", ".ckpt", ".joblib", ".pickle", ".pkl", ".pt", ".pth"}


class State(Enum):
    """What a checkpoint's directory turned out to be."""

    COMMITTED = "committed"
    PART = "a part"
    TORN = "torn"
    DAMAGED = "damaged"
    NEWER = "unreadable"


@dataclass(frozen=True)
class Survey:
    """What is known of one checkpoint's directory."""

    path: Path
    """The directory."""
    state: State
    """Its state."""
    problems: tuple[str, ...] = ()
    """What is wrong, each with the file's name."""
    deleted: tuple[str, ...] = ()
    """Files of the manifest that are not there, unless other nodes keep them."""
    manifest: Manifest | None = None
    """The manifest, unless it cannot be read."""

    @property
    def good(self) -> bool:
        """Whether the checkpoint can be loaded, a part of one with those of the other nodes."""
        return self.state in (State.COMMITTED, State.PART)

    @property
    def kept(self) -> str:
        """How much of the checkpoint is in the directory, and who keeps the others."""
        if self.manifest is None or self.state is not State.PART:
            return ""
        here = len(file_sizes(self.path, list(self.manifest.files)))
        return f"{here} of {len(self.manifest.files)} files; {self.manifest.nodes} nodes saved it together"

    def describe(self) -> str:
        """State and reasons on one line."""
        notes = list(self.problems) or [f"{name} was deleted" for name in self.deleted]
        notes += [self.kept] if self.kept else []
        return f"{self.state.value} ({'; '.join(notes)})" if notes else self.state.value


def survey(path: Path, *, checksums: bool) -> Survey:
    """Compare a checkpoint's files with its manifest, all of them.

    Args:
        path: The checkpoint's directory.
        checksums: Compare checksums too, not only sizes.

    Returns:
        The findings.

    Raises:
        OSError: A file cannot be read.
    """
    if not (path / MANIFEST_NAME).is_file():
        return Survey(path, State.TORN, (f"it has no {MANIFEST_NAME}: it was not committed, or is not ours",))
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        # The messages begin with the path, which is named beside them.
        reason = str(error).replace(str(path / MANIFEST_NAME), MANIFEST_NAME)
        return Survey(path, State.NEWER if _is_newer(path) else State.DAMAGED, (reason,))
    there = file_sizes(path, list(manifest.files))
    deleted = [name for name in manifest.files if name not in there]
    records = {name: record for name, record in manifest.files.items() if name not in deleted}
    found = [find_damage(path, name, record, checksums=checksums) for name, record in records.items()]
    problems = [problem for problem in found if problem is not None]
    name = _NAME.fullmatch(path.name)
    if name and int(name[1]) != manifest.step:
        problems.insert(0, f"it holds step {manifest.step} but is named {path.name}; give it its name back")
    if deleted and manifest.nodes > 1:
        return Survey(path, State.DAMAGED if problems else State.PART, tuple(problems), (), manifest)
    state = State.DAMAGED if problems else State.COMMITTED
    return Survey(path, state, tuple(problems), tuple(deleted), manifest)


def survey_all(directory: Path, *, checksums: bool) -> Iterator[Survey]:
    """Survey the checkpoints of a directory, highest step first.

    Args:
        directory: The directory that holds them.
        checksums: Compare checksums too, not only sizes.

    Yields:
        The findings. A checkpoint that a running training deletes meanwhile is left out.
    """
    for _, path in checkpoint_directories(directory):
        found = survey(path, checksums=checksums)
        if path.is_dir():
            yield found


def open_checkpoint(path: Path) -> Manifest:
    """The manifest of a checkpoint that a command needs.

    Args:
        path: The checkpoint's directory.

    Returns:
        The manifest.

    Raises:
        CheckpointError: There is no checkpoint, it is torn, or its manifest is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint directory {path}. `checkpoint-core ls` lists them.")
    if not (path / MANIFEST_NAME).is_file() and (inside := checkpoint_directories(path)):
        raise CheckpointError(
            f"{path} contains checkpoints but is not one itself. Pass one of them, such as {inside[0][1]}."
        )
    return read_manifest(path)


def check_directory(path: Path) -> None:
    """Check that a path can hold checkpoints.

    Raises:
        CheckpointError: It is not a directory, or a checkpoint itself.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}. Pass the output_dir of a training.")
    if (path / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint itself. Pass the directory that holds it, {path.parent}."
        )


def describe_leftover(leftover: Leftover) -> str:
    """What a temporary directory is, and what becomes of it.

    Args:
        leftover: The directory.

    Returns:
        One line.
    """
    owner = f"process {leftover.pid}"
    if not leftover.is_abandoned():
        doing = {REPLACED: "being replaced", DELETED: "being deleted"}.get(leftover.kind, "being written")
        return f"{doing} by {owner} ({leftover.path.name})"
    if leftover.kind == REPLACED and not (leftover.path.parent / f"checkpoint-{leftover.step}").exists():
        return f"put aside by {owner}, which died; the next save or load puts it back ({leftover.path.name})"
    kind = "half deleted" if leftover.kind == DELETED else "leftover of a killed save"
    return f"{kind}, {owner}; the next save removes it ({leftover.path.name})"


def metrics_text(manifest: Manifest) -> str:
    """The metrics of a checkpoint on one line."""
    return ", ".join(f"{name} {number_text(value)}" for name, value in (manifest.metrics or {}).items())


def total_bytes(directory: Path) -> int:
    """Bytes of all files below a directory."""
    if isinstance(directory, StorePath):
        return sum(info.size for info in directory.store.objects(directory.key))
    total = 0
    for path in directory.rglob("*"):
        try:
            total += 0 if path.is_dir() else path.lstat().st_size
        except FileNotFoundError:
            continue  # Being removed at this moment.
    return total


def find_damage(checkpoint: Path, name: str, record: FileRecord, *, checksums: bool) -> str | None:
    """Compare one file, which is there, with what was written; what is wrong, with the file's name."""
    file = checkpoint / name
    if not file.is_file():
        return f"{name} is not a regular file"
    if (size := file.stat().st_size) != record.size:
        return f"{name} has {size} bytes, {record.size} were written"
    if checksums and checksum_file(file).checksum != record.checksum:
        return f"{name} does not match its checksum"
    return None


def _is_newer(path: Path) -> bool:
    try:
        document = read_json(path / MANIFEST_NAME)
    except CheckpointError:
        return False
    schema = document.get("schema_version") if isinstance(document, dict) else None
    return isinstance(schema, int) and schema > SPREAD_SCHEMA_VERSION


def list_checkpoints(directory: Path) -> int:
    """Print one row for each checkpoint, and for what saves left behind. Changes nothing.

    Args:
        directory: The directory that holds the checkpoints.

    Returns:
        0, or 1 when a checkpoint is torn, damaged or of a newer version.

    Raises:
        CheckpointError: The directory is not there, or is a checkpoint.
    """
    check_directory(directory)
    found = list(survey_all(directory, checksums=False))
    rows = [_row(checkpoint) for checkpoint in found]
    for leftover in find_leftovers(directory):
        told = [
            _age(files := _files_of(leftover)),
            size_text(total_bytes(files)),
            "",
            "",
            describe_leftover(leftover),
        ]
        rows.append([str(leftover.step), *told])
    for path in sorted(directory.glob("damaged-checkpoint-*")):
        state = f"kept aside when its step was saved again ({path.name})"
        rows.append([path.name.split("-")[2], _age(path), size_text(total_bytes(path)), "", "", state])
    if rows:
        print_table(_HEADER, rows)
    else:
        print(f"no checkpoints in {directory}")
    return 0 if all(checkpoint.good for checkpoint in found) else 1


def _files_of(leftover: Leftover) -> Path:
    """Where the files of a leftover are: beside its marker, in a store."""
    path = leftover.path
    return (marked_directory(path) or path) if isinstance(path, StorePath) else path


def _row(checkpoint: Survey) -> list[str]:
    manifest = checkpoint.manifest
    return [
        checkpoint.path.name.rpartition("-")[2],
        _age(checkpoint.path),
        size_text(total_bytes(checkpoint.path)),
        str(manifest.world_size) if manifest else "",
        metrics_text(manifest) if manifest else "",
        checkpoint.describe(),
    ]


def _age(path: Path) -> str:
    # A directory's time changes when a file in it is deleted; the manifest is written once, last.
    if isinstance(path, StorePath):
        times = {info.key: info.modified for info in path.store.objects(path.key)}
        newest = times.get((path / MANIFEST_NAME).key, max(times.values(), default=None))
        return "" if newest is None else age_text(time.time() - newest)
    for candidate in (path / MANIFEST_NAME, path):
        if candidate.exists():
            return age_text(time.time() - candidate.stat().st_mtime)
    return ""


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
        raise CheckpointError(f"there is no directory {path}. Pass a checkpoint, or what holds checkpoints.")
    inside = bool(checkpoint_directories(path))
    single = (path / MANIFEST_NAME).is_file() or not inside
    if single and not inside and not _claims_to_be_checkpoint(path):
        raise CheckpointError(
            f"{path} has no {MANIFEST_NAME} and holds no checkpoint-<step>. Pass one that does."
        )
    whole = True
    for found in [survey(path, checksums=True)] if single else survey_all(path, checksums=True):
        if found.state is State.NEWER:
            raise CheckpointError(f"{found.path}: {found.problems[0]}")
        _report(found)
        whole = whole and found.state is State.COMMITTED
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
    elif found.kept:
        print(f"{name}: a part, step {manifest.step}, {found.kept}. The files that are here are whole.")
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
        if (
            (isinstance(path, StorePath) or not path.is_dir())
            and name != MANIFEST_NAME
            and name not in manifest.files
        ):
            found.append(name)
    return found


@dataclass(frozen=True)
class BestRule:
    """Which checkpoints are the best."""

    metric: str
    """The metric that tells."""
    count: int
    """How many of the best to keep."""
    greater_is_better: bool
    """The direction."""

    def value(self, manifest: Manifest) -> float | None:
        """The metric of a checkpoint; None when it has none, or NaN, which is never the best."""
        value = (manifest.metrics or {}).get(self.metric)
        return None if value is None or value != value else value


def _best_rule(metric: str | None, count: int | None, greater_is_better: bool | None) -> BestRule | None:
    """The rule that the command line states; None without ``--keep-best``.

    Raises:
        CheckpointError: Options that belong together are not all given.
    """
    if count is None and (metric is not None or greater_is_better is not None):
        raise CheckpointError("--metric and its direction need --keep-best K, the number of best to keep.")
    if count is None:
        return None
    if metric is None:
        raise CheckpointError(
            f"--keep-best {count} needs --metric NAME. `checkpoint-core ls` shows the metrics."
        )
    try:
        return BestRule(metric, count, not lower_is_better(metric, greater_is_better))
    except CheckpointError as error:
        raise CheckpointError(
            f"--metric {metric} does not tell by its name which value is better. Add "
            "--greater-is-better or --lower-is-better."
        ) from error


_Candidate = tuple[Path, Manifest]


class _Verdicts:
    """Why each checkpoint that stays does. Those without a reason go."""

    def __init__(self) -> None:
        self.reasons: dict[Path, list[str]] = {}
        self._whole: dict[Path, bool] = {}

    def keep(self, path: Path, reason: str) -> None:
        self.reasons.setdefault(path, []).append(reason)

    def is_whole(self, candidate: _Candidate) -> bool:
        """Whether it may take a place among those kept: what is damaged must not push out what is not."""
        path, _ = candidate
        if path not in self._whole:
            found = survey(path, checksums=True)
            self._whole[path] = found.good
            if not found.good:
                self.keep(path, found.describe())
        return self._whole[path]


def prune(
    directory: Path,
    *,
    keep: int,
    keep_best: int | None,
    metric: str | None,
    greater_is_better: bool | None,
    all_runs: bool,
    parts: bool,
    yes: bool,
) -> int:
    """Print which checkpoints go and why the others stay; delete them when told to.

    Args:
        directory: The directory that holds the checkpoints.
        keep: How many of the newest stay, at least 1.
        keep_best: How many of the best stay besides.
        metric: What tells which are the best.
        greater_is_better: Its direction; None goes by the name.
        all_runs: Treat checkpoints of all runs alike. Otherwise only those of the newest one's run may go.
        parts: Treat parts, of which other nodes keep the other files, as whole checkpoints. Otherwise they
            stay: which of them the other nodes can still use is not seen here.
        yes: Delete. Otherwise nothing is changed.

    Returns:
        0.

    Raises:
        CheckpointError: A run owns the directory, saves there, no checkpoint has the metric, or options that
            belong together are not all given.
        OSError: A checkpoint cannot be deleted.
    """
    best = _best_rule(metric, keep_best, greater_is_better)
    check_directory(directory)
    _refuse_if_live(directory)
    verdicts = _Verdicts()
    candidates: list[_Candidate] = []
    for found in survey_all(directory, checksums=False):
        if found.manifest is None or not found.good:
            verdicts.keep(found.path, found.describe())
        elif found.path.is_symlink() or found.path.name != f"checkpoint-{found.manifest.step}":
            verdicts.keep(found.path, "a link or a copy, which no run made")
        elif found.state is State.PART and not parts:
            verdicts.keep(found.path, f"{found.describe()}; --parts lets it go, too")
        else:
            candidates.append((found.path, found.manifest))
    _choose(candidates, keep, best, all_runs, verdicts)
    doomed = [candidate for candidate in candidates if candidate[0] not in verdicts.reasons]
    _print_plan(directory, doomed, verdicts, best)
    if not doomed:
        print("nothing to delete")
        return 0
    what = f"{len(doomed)} checkpoint(s), {size_text(sum(total_bytes(path) for path, _ in doomed))}"
    if not yes:
        print(f"dry run: --yes would delete {what}")
        return 0
    # A run that begins meanwhile would resume from what goes, and one under way deletes by itself. A store
    # has no lease: there a checkpoint is gone at once, with its manifest.
    with nullcontext() if isinstance(directory, StorePath) else DirectoryLease(directory):
        _refuse_if_live(directory)  # Once more: verification may have taken long.
        for path, manifest in doomed:
            with suppress(FileNotFoundError):  # Something else has deleted it already.
                remove_checkpoint(path, manifest.step)
    print(f"deleted {what}")
    return 0


def _refuse_if_live(directory: Path) -> None:
    for leftover in find_leftovers(directory):
        if not leftover.is_abandoned():
            raise CheckpointError(
                f"{directory} is in use, because checkpoint-{leftover.step} is "
                f"{describe_leftover(leftover)}. Wait until that training has ended. Its own rotation "
                "deletes as well (save_total_limit)."
            )


def _choose(
    candidates: Sequence[_Candidate], keep: int, best: BestRule | None, all_runs: bool, verdicts: _Verdicts
) -> None:
    """Find reasons to keep candidates, which come with the highest step first."""
    newest = next(filter(verdicts.is_whole, candidates), None)
    if newest is None:
        for path, _ in candidates:
            verdicts.keep(path, "no whole checkpoint to keep instead")
        return
    run_id = newest[1].run_id
    mine = [each for each in candidates if all_runs or each[1].run_id == run_id]
    for number, (path, _) in enumerate(islice(filter(verdicts.is_whole, mine), keep), 1):
        verdicts.keep(path, f"newest ({number} of {keep})")
    if best is not None:
        _keep_best(mine, best, verdicts)
    for path, manifest in candidates:
        if (path, manifest) not in mine:
            verdicts.keep(path, f"of another run ({manifest.run_id})")


def _keep_best(candidates: Sequence[_Candidate], best: BestRule, verdicts: _Verdicts) -> None:
    valued = [(value, each) for each in candidates if (value := best.value(each[1])) is not None]
    if not valued:
        known = sorted({name for _, manifest in candidates for name in manifest.metrics or {}})
        raise CheckpointError(
            f"no checkpoint has a value for --metric {best.metric}. They have "
            f"{', '.join(known) or 'no metrics'}."
        )
    # Of equal values the earlier checkpoint is the better one.
    valued.sort(key=lambda pair: (-pair[0] if best.greater_is_better else pair[0], pair[1][1].step))
    whole = (pair for pair in valued if verdicts.is_whole(pair[1]))
    for number, (value, (path, _)) in enumerate(islice(whole, best.count), 1):
        verdicts.keep(path, f"best ({number} of {best.count}, {best.metric} {number_text(value)})")


def _print_plan(
    directory: Path, doomed: Sequence[_Candidate], verdicts: _Verdicts, best: BestRule | None
) -> None:
    rows = {path: ["keep", path.name, "; ".join(reasons)] for path, reasons in verdicts.reasons.items()}
    for path, manifest in doomed:
        value = best.value(manifest) if best else None
        note = f"{best.metric} {number_text(value)}" if best and value is not None else ""
        rows[path] = ["delete", path.name, note]
    if rows:
        ordered = sorted(rows, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
        print_table(("what", "checkpoint", "why"), [rows[path] for path in ordered])
    else:
        print(f"no checkpoints in {directory}")
