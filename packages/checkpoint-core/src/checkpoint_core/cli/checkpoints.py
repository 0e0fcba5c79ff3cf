"""``ls`` and ``verify``: the checkpoints of a directory, and their state."""

import io
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint_core.directory import (
    DELETED,
    REPLACED,
    Leftover,
    checkpoint_directories,
    find_leftovers,
)
from checkpoint_core.errors import CheckpointError
from checkpoint_core.files import FileRecord, checksum_file, read_json
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
