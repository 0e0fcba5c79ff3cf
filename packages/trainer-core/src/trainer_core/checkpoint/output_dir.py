"""One run at a time writes to an output directory; an earlier one that it does not continue moves aside."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint_core import (
    CheckpointError,
    DirectoryLease,
    LeaseHeldError,
    LeaseLostError,
    find_lease_holder,
)
from dist_env import gather_objects, get_logger

from ..arguments import TrainingArguments
from ..distributed.ranks import Ranks
from ..errors import ConfigurationError

logger = get_logger(__name__)

PREVIOUS = "previous-"
"""Folders of an output directory in which an earlier run rests; the rest of the name is the time in UTC."""


def checkpoints_in(output_dir: str | Path, *, above: int = -1) -> list[Path]:
    """Directories with a checkpoint's name, good or bad, whose step is greater than `above`."""
    directory = Path(output_dir)
    found = directory.glob("checkpoint-*") if directory.is_dir() else ()
    steps = {path: path.name.removeprefix("checkpoint-") for path in found if path.is_dir()}
    return sorted(path for path, step in steps.items() if step.isdecimal() and int(step) > above)


def move_aside(output_dir: str | Path, paths: Iterable[Path]) -> Path | None:
    """Move files and folders to a new `previous-<time>/` in an output directory.

    Nothing is deleted, and nothing in such a folder is found by a later resume. Let one process do it.

    Args:
        output_dir: The output directory.
        paths: What to move; what does not exist is left out.

    Returns:
        The folder; None if there was nothing to move.

    Raises:
        ConfigurationError: If something cannot be moved.
    """
    existing = [path for path in paths if path.exists()]
    if not existing:
        return None
    directory = Path(output_dir).absolute()
    name = PREVIOUS + time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        folder = _make_new(directory, name)
        for path in existing:
            shutil.move(path, folder / path.name)  # the logs may lie on another file system
    except OSError as error:
        raise ConfigurationError(
            "output_dir",
            str(output_dir),
            f"holds an earlier run that cannot be moved aside ({error})",
            "allow this process to rename there, or choose another output_dir",
        ) from error
    names = ", ".join(path.name for path in existing)
    logger.warning("moved aside to %s: %s", folder, names)
    return folder


def _make_new(directory: Path, name: str) -> Path:
    number = 1
    while True:
        folder = directory / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


class OutputLease:
    """The lease of a trainer's output directory, and of its log directory where that is another one.

    One rank takes it for all; with `save_on_each_node` one rank of each node takes that of its node.

    Args:
        args: The arguments.
        ranks: The ranks.
    """

    def __init__(self, args: TrainingArguments, ranks: Ranks) -> None:
        times = {
            "heartbeat_seconds": args.lease_heartbeat_seconds,
            "takeover_seconds": args.lease_takeover_seconds,
        }
        self.directory = DirectoryLease(args.output_dir, **times)
        """For the manager of the checkpoints."""
        self._args = args
        self._ranks = ranks
        env = ranks.env
        self._leases: list[tuple[str, DirectoryLease]] = []
        if env.rank == 0 or (args.save_on_each_node and env.local_rank == 0):
            self._leases.append(("output_dir", self.directory))
        if env.rank == 0 and args.log_path.resolve() != Path(args.output_dir).resolve():
            self._leases.append(("logging_dir", DirectoryLease(args.log_path, **times)))
        self._users = 0
        self._known: set[str] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Own the directories meanwhile; may be entered again inside. Collective.

        Raises:
            ConfigurationError: On every rank, if another run owns one, or one cannot be written, or another
                run has saved in the output directory since this one left it or loaded its state there.
        """
        if self._users == 0:
            with self._ranks.lost_rank_errors("taking the output directory"):
                self._acquire()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                if self._leases and self._owns_still():
                    self.note_content()
                self._release()

    def note_content(self) -> None:
        """Remember which checkpoints are in the output directory: others that come are another run's."""
        self._known = self._content()

    def _content(self) -> set[str]:
        """Names of what every run leaves that continues, or begins anew, in the output directory."""
        directory = Path(self._args.output_dir)
        return {path.name for path in (*checkpoints_in(directory), *directory.glob(f"{PREVIOUS}*"))}

    def _owns_still(self) -> bool:
        try:
            self.directory.check()
        except LeaseLostError:
            return False
        return True

    def may_log(self) -> bool:
        """Whether callbacks may write a record now.

        Between two calls of `train` nothing is owned, and an evaluation may continue beside the training of
        another process, whose log it must leave alone.

        Raises:
            checkpoint_core.LeaseLostError: If another run has taken over what this one owned.
        """
        if self._users:
            for _, lease in self._leases:
                if lease.held:
                    lease.check()
            return True
        holder = find_lease_holder(self._args.log_path)
        if holder is not None:
            logger.warning(
                "%s is in use by %s: a record of this process is not written to its logs",
                self._args.log_path,
                holder.describe(),
            )
        return holder is None

    def _acquire(self) -> None:
        refusals: list[list[str] | None] = gather_objects(self._refusal(), self._ranks.env)
        for refusal in refusals:
            if refusal is not None:
                self._release()
                setting, value, rule, fix = refusal
                raise ConfigurationError(setting, value, rule, fix)

    def _refusal(self) -> list[str] | None:
        """Take the leases; what stands against it, as the parts of a ConfigurationError."""
        if (refusal := self._refusal_of_lease()) is not None:
            return refusal
        if self._known is None:
            self.note_content()
        new = sorted(self._content() - (self._known or set())) if self._leases else []
        if not new or self._args.save_strategy == "no":
            return None
        rule = (
            f"was used by another run, which left {new[-1]} there, and this trainer does not have the state "
            "of that run"
        )
        return [
            "output_dir",
            self._args.output_dir,
            rule,
            "call load_checkpoint() first, or make a new Trainer",
        ]

    def _refusal_of_lease(self) -> list[str] | None:
        for setting, lease in self._leases:
            value = str(getattr(self._args, setting))
            try:
                lease.acquire()
            except LeaseHeldError as error:
                fix = f"wait until that run has ended, stop it, or choose another {setting}"
                return [setting, value, f"is in use by {error.holder.describe()}", fix]
            except CheckpointError as error:
                if self._args.save_strategy != "no":
                    return [setting, value, str(error), f"choose another {setting}"]
                # A run that writes nothing may have a directory that cannot be written.
                logger.info("this run does not own its directory: %s", error)
        return None

    def _release(self) -> None:
        for _, lease in self._leases:
            lease.release()
