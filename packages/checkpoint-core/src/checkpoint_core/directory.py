"""The commit protocol: a checkpoint appears by one rename, after everything in it is on the disk.

Temporary directories are hidden siblings of the checkpoints: ``.<kind>-checkpoint-<step>-<token>``. The token
names the machine, the process and its start time, so that a later process can tell a save in progress from
what a killed one left behind. The name carries it because a name appears in one atomic step.
"""

import hashlib
import logging
import os
import re
import shutil
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from checkpoint_core.errors import CheckpointError, free_bytes
from checkpoint_core.files import sync_file
from checkpoint_core.manifest import MANIFEST_NAME, read_manifest
from checkpoint_core.store_directory import finish_leftover, newest_change, remove_committed
from checkpoint_core.store_path import StorePath
from dist_env import StoreError

STAGING = "tmp"
"""A checkpoint being written."""
REPLACED = "old"
"""A committed checkpoint, put aside while another one of the same step takes its place."""
DELETED = "del"
"""A checkpoint being deleted."""
FOREIGN_IDLE_SECONDS = 3600.0
"""A process of another machine cannot be asked; its directory is dead after this time without a write."""
_LEFTOVER_NAME = re.compile(
    rf"\.({STAGING}|{REPLACED}|{DELETED})-checkpoint-(\d+)-([0-9a-f]{{8}})-(\d+)-(\d+)-[0-9a-f]{{8}}"
)
_logger = logging.getLogger(__name__)
_NAME = re.compile(r"checkpoint-(\d+)")
_MARGIN_BYTES = 1024 * 1024
CHECKPOINT_PREFIX = "checkpoint-"
_P = TypeVar("_P", bound=Path)


@dataclass(frozen=True)
class Leftover:
    """A temporary directory found in an output directory."""

    path: Path
    kind: str
    step: int
    machine: str
    pid: int
    started: int

    def is_abandoned(self) -> bool:
        """Whether the process that made it is gone.

        Returns:
            On the machine of the owner, whether the process has ended. On another machine, whether nothing in
            the directory has changed for an hour.
        """
        if self.machine != machine_token():
            return time.time() - _newest_change(self.path) > FOREIGN_IDLE_SECONDS
        return has_ended(self.pid, self.started)


def temporary_path(output_dir: _P, kind: str, step: int, save: str | None = None) -> _P:
    """A name for a temporary directory of this process, or for the marker of a save in a store.

    Args:
        output_dir: The directory of the checkpoints.
        kind: :data:`STAGING`, :data:`REPLACED` or :data:`DELETED`.
        step: The step of the checkpoint.
        save: Eight hexadecimal digits that tell the save; None makes new ones.

    Returns:
        The path; nothing is created.
    """
    process = f"{machine_token()}-{os.getpid()}-{process_start(os.getpid()) or 0}"
    return output_dir / f".{kind}-checkpoint-{step}-{process}-{save or uuid.uuid4().hex[:8]}"


def find_leftovers(output_dir: Path) -> list[Leftover]:
    """All temporary directories, or markers in a store, of living and dead processes.

    Args:
        output_dir: The directory of the checkpoints.

    Returns:
        The directories; empty when ``output_dir`` does not exist.
    """
    if not output_dir.is_dir():
        return []
    found = []
    for path in sorted(output_dir.iterdir()):
        match = _LEFTOVER_NAME.fullmatch(path.name)
        if match and (isinstance(path, StorePath) or (path.is_dir() and not path.is_symlink())):
            kind, step, machine, pid, started = match.groups()
            found.append(Leftover(path, kind, int(step), machine, int(pid), int(started)))
    return found


def machine_token() -> str:
    """Eight digits for this machine, boot and process namespace: where a process id has one meaning.

    Returns:
        The digits; processes with the same ones can ask the system about one another.
    """
    parts = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        path = Path(source)
        if path.is_symlink():
            parts.append(str(path.readlink()))
        elif path.exists():
            parts.append(path.read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def has_ended(pid: int, started: int) -> bool:
    """Whether a process of this machine has ended.

    Args:
        pid: Its id.
        started: What :func:`process_start` gave for it.

    Returns:
        Whether it is certain that it has.
    """
    now = process_start(pid)
    # 0: it lives, and when it began cannot be told.
    return now is None or (now != started and 0 not in (now, started))


def process_start(pid: int) -> int | None:
    """When a process of this machine began, which tells it from a later one with the same id.

    Args:
        pid: The process id.

    Returns:
        Clock ticks since boot; None when there is no such process. Systems without /proc give 0 for every
        living process, and those that hide other users' processes for these, so that only the id tells there.
    """
    if Path("/proc/self/stat").exists():
        try:
            # The second field, the command in parentheses, may hold spaces; field 22 is counted after it.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return _ask_by_signal(pid)
        # A killed process that nobody has waited for yet still has an entry, but writes no more.
        return None if fields[0] in "ZX" else int(fields[19])
    return _ask_by_signal(pid)


def _ask_by_signal(pid: int) -> int | None:
    """0 for a process that exists, which may be another user's."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        return 0
    return 0


def _newest_change(directory: Path) -> float:
    if isinstance(directory, StorePath):
        return newest_change(directory)
    newest = 0.0
    for path in [directory, *directory.rglob("*")]:
        try:
            newest = max(newest, path.lstat().st_mtime)
        except FileNotFoundError:
            continue  # Being written or removed at this moment.
    return newest


def checkpoint_directories(output_dir: Path) -> list[tuple[int, Path]]:
    """Directories with a checkpoint's name, good or bad.

    Args:
        output_dir: The directory of the checkpoints.

    Returns:
        Step and path, highest step first; empty when ``output_dir`` does not exist.
    """
    if not output_dir.is_dir():
        return []
    found = [(match, path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in found if path.is_dir()), reverse=True)


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies.

    Args:
        output_dir: The directory of the checkpoints.
        step: The step.

    Returns:
        ``<output_dir>/checkpoint-<step>``.
    """
    return output_dir / f"{CHECKPOINT_PREFIX}{step}"


def check_space(directory: Path, needed: int) -> None:
    """Refuse to begin what cannot be finished.

    Args:
        directory: Where to write; it need not exist.
        needed: Bytes.

    Raises:
        CheckpointError: There is not that much space; names both numbers and the directory.
    """
    free = free_bytes(directory)
    if needed + _MARGIN_BYTES > free:
        raise CheckpointError(
            f"not enough space for the checkpoint: it needs {needed} bytes ({needed / 1e9:.2f} GB), but "
            f"{directory} has {free} bytes free ({free / 1e9:.2f} GB). Free space or lower save_total_limit."
        )


def check_target(final: Path, run_id: str) -> None:
    """Refuse to replace what this run did not write.

    Args:
        final: The checkpoint's final path.
        run_id: The id of this run.

    Raises:
        CheckpointError: Something else is there; names it and the remedy.
    """
    in_store = isinstance(final, StorePath)
    if not (final / MANIFEST_NAME if in_store else final).exists() and not final.is_symlink():
        return  # What a killed save to a store left is in nobody's way.
    if final.is_symlink() or not (final / MANIFEST_NAME).is_file():
        raise CheckpointError(
            f"{final} exists and is not a committed checkpoint of checkpoint-core. Move it away or choose "
            "another output_dir."
        )
    try:
        owner = read_manifest(final).run_id
    except CheckpointError:
        return  # A damaged checkpoint blocks nothing; publish() keeps it under another name.
    check_owner(final, owner, run_id)


def check_owner(final: Path, owner: str, run_id: str) -> None:
    """Refuse to replace a checkpoint of another run.

    Args:
        final: The checkpoint's final path.
        owner: The id of the run that its manifest names.
        run_id: The id of this run.

    Raises:
        CheckpointError: They differ.
    """
    if owner != run_id:
        raise CheckpointError(
            f"{final} was written by another run ({owner}, this one is {run_id}). Resume from it with "
            "load_checkpoint(), or choose another output_dir."
        )


def check_new(path: Path, output_dir: Path, step: int) -> None:
    """Refuse a directory of one's own choice that is there already, or would be misread.

    Args:
        path: Where a checkpoint is to be written that stands apart.
        output_dir: The directory of the run's other checkpoints.
        step: The step to be written.

    Raises:
        CheckpointError: Naming it and the remedy.
    """
    in_store = isinstance(path, StorePath)
    if (path / MANIFEST_NAME if in_store else path).exists() or path.is_symlink():
        raise CheckpointError(f"path={str(path)!r} exists already. Name a new directory, or move that away.")
    number = path.name.removeprefix(CHECKPOINT_PREFIX)
    if number == path.name or not number.isdecimal():
        return
    if path.parent.resolve() == output_dir.resolve():
        raise CheckpointError(
            f"path={str(path)!r} is the place of a checkpoint of this run, which rotates. Leave path out to "
            "save it there, or choose another name."
        )
    if int(number) != step:
        raise CheckpointError(
            f"path={str(path)!r} has the name of step {int(number)}, but this is step {step}. Choose "
            "another name."
        )


def check_other_runs(output_dir: Path, step: int, run_id: str) -> None:
    """Refuse to write checkpoints that an automatic resume would pass over for those of another run.

    Args:
        output_dir: The directory of the checkpoints.
        step: The step to be written.
        run_id: The id of this run.

    Raises:
        CheckpointError: Another run wrote a later checkpoint here; names it and the remedy.
    """
    for path in output_dir.glob(f"{CHECKPOINT_PREFIX}*"):
        number = path.name.removeprefix(CHECKPOINT_PREFIX)
        if not number.isdecimal() or int(number) <= step:
            continue
        try:
            owner = read_manifest(path).run_id
        except StoreError:
            raise
        except (CheckpointError, OSError):
            continue
        if owner != run_id:
            raise CheckpointError(
                f"{path} was written by another run, and an automatic resume would choose it instead of "
                f"step {step} of this one. Resume from it with load_checkpoint(), move it away, or choose "
                "another output_dir."
            )


def create_staging(output_dir: Path, step: int) -> Path:
    """Make the temporary directory in which a checkpoint is written.

    Args:
        output_dir: The directory of the checkpoints; made if needed.
        step: The step.

    Returns:
        The new directory.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    staging = temporary_path(output_dir, STAGING, step)
    staging.mkdir()
    return staging


def publish(staging: Path, final: Path, step: int) -> None:
    """Make a complete staging directory the checkpoint of its step.

    An older checkpoint of the same step is put aside by a rename, and removed afterwards. If the process dies
    between the two renames, :func:`clean_leftovers` puts the older one back. A damaged one is kept aside.

    Args:
        staging: The complete directory, with its manifest, synced to the disk.
        final: The checkpoint's final path.
        step: The step.
    """
    aside = _put_aside(final, step)
    try:
        staging.rename(final)
    except BaseException:
        if aside is not None and not final.exists():
            aside.rename(final)
        raise
    sync_file(final.parent)
    if aside is not None and aside.name.startswith("."):
        discard(aside)


def remove_checkpoint(checkpoint: Path, step: int) -> None:
    """Delete a checkpoint so that no moment shows it half deleted.

    Args:
        checkpoint: The checkpoint.
        step: Its step.
    """
    if isinstance(checkpoint, StorePath):
        save = read_manifest(checkpoint).save_directory
        remove_committed(checkpoint, temporary_path(checkpoint.parent, DELETED, step, save))
        return
    hidden = temporary_path(checkpoint.parent, DELETED, step)
    checkpoint.rename(hidden)
    discard(hidden)


def discard(directory: Path) -> None:
    """Remove a temporary directory; what cannot be removed is named in a warning and stays hidden.

    Args:
        directory: The directory.
    """
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning(
            "cannot remove the temporary directory %s (%s); the next save tries again", directory, error
        )


def restore_replaced(output_dir: Path) -> None:
    """Put back checkpoints whose replacement was interrupted between its two renames.

    Args:
        output_dir: The directory of the checkpoints.
    """
    if isinstance(output_dir, StorePath):
        return  # A manifest is replaced in one step.
    for leftover in find_leftovers(output_dir):
        final = checkpoint_path(output_dir, leftover.step)
        if leftover.kind == REPLACED and not final.exists() and leftover.is_abandoned():
            try:
                leftover.path.rename(final)
            except FileNotFoundError:
                continue  # Another process put it back first.
            except OSError as error:
                _logger.warning("cannot put %s back as %s (%s)", leftover.path, final, error)
                continue
            _logger.warning("%s is back: the save that was replacing it was interrupted", final)


def clean_leftovers(output_dir: Path) -> None:
    """Remove what killed saves left behind; temporary directories of living processes stay.

    Args:
        output_dir: The directory of the checkpoints.
    """
    restore_replaced(output_dir)
    for leftover in find_leftovers(output_dir):
        if leftover.is_abandoned():
            _logger.info("removing %s, left behind by process %d", leftover.path, leftover.pid)
            if isinstance(leftover.path, StorePath):
                finish_leftover(leftover.path)
            else:
                discard(leftover.path)


def _put_aside(final: Path, step: int) -> Path | None:
    if not final.exists():
        return None
    try:
        read_manifest(final)
    except CheckpointError as error:
        aside = final.with_name(f"damaged-{final.name}-{uuid.uuid4().hex[:8]}")
        _logger.warning("keeping the damaged %s as %s (%s)", final, aside.name, error)
    else:
        aside = temporary_path(final.parent, REPLACED, step)
    final.rename(aside)
    return aside
