"""The callback that writes log records to a JSON file."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from ..logs.log_file import LOG_FILENAME, LogEntry, append_entry, parse_entries, write_entries
from ..records import is_final
from .events import EventHandlers, LoggingArguments, ProgressState

_log = logging.getLogger("perf_metrics")


class JsonLogger(EventHandlers):
    """Writes each log record into a JSON array in the run's log directory.

    Each entry has `global_step`, `epoch` and `timestamp` (seconds since 1970), then the record. Lists stay
    arrays; nan and infinities become null. The file is valid JSON after every entry, and appending costs the
    same however long it is. At the start of training, entries beyond the step where the run goes on are
    dropped, and so are the final metrics of the part before it; the curve of a resumed run is one curve. A
    file damaged by a kill is repaired, and the damaged one is kept beside it as `<filename>.damaged`. Only
    the process with world rank 0 writes.

    Args:
        filename: Name of the file in `args.logging_dir`, or in `args.output_dir` where that is not set.

    Raises:
        ValueError: `filename` is not a plain file name.
    """

    def __init__(self, filename: str = LOG_FILENAME) -> None:
        if not filename or Path(filename).name != filename:
            raise ValueError(f"filename={filename!r}: must be a file name; the directory is args.logging_dir")
        self._filename = filename
        self._place = ""
        self._file = Path(filename)

    @property
    def filename(self) -> str:
        """Name of the file in the log directory."""
        return self._filename

    def on_train_begin(
        self, args: LoggingArguments, state: ProgressState, control: object, **_: object
    ) -> None:
        """Repair the file if need be and drop what lies beyond the current step."""
        if not state.is_world_process_zero:
            return
        path = self._path(args)
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = _load_or_repair(path)
        kept = [entry for entry in entries if _step(entry) <= state.global_step and not is_final(entry)]
        if len(kept) < len(entries) or not path.exists():
            write_entries(path, kept)

    def on_log(
        self,
        args: LoggingArguments,
        state: ProgressState,
        control: object,
        *,
        logs: Mapping[str, object],
        **_: object,
    ) -> None:
        """Append one entry."""
        if not state.is_world_process_zero:
            return
        position = {"global_step": state.global_step, "epoch": state.epoch, "timestamp": time.time()}
        entry = {**position, **logs}
        path = self._path(args)
        try:
            appended = append_entry(path, entry)
        except FileNotFoundError:  # nobody looks beforehand: that would cost something at each entry
            appended = False
        if not appended:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_entries(path, _load_or_repair(path))
            append_entry(path, entry)

    def _path(self, args: LoggingArguments) -> Path:
        # Not every trainer has the first one: transformers 5 does not.
        logging_dir: str | None = getattr(args, "logging_dir", None)
        place = logging_dir or args.output_dir
        if not place:
            raise ValueError(
                f"logging_dir={logging_dir!r}: JsonLogger needs a directory; set it, or output_dir"
            )
        if place != self._place:
            self._place, self._file = place, Path(place) / self._filename
        return self._file


def _load_or_repair(path: Path) -> list[LogEntry]:
    """Return the entries; rewrite a file that cannot be appended to, keeping a copy of a damaged one."""
    if not path.exists():
        return []
    data = path.read_bytes()
    entries, intact = parse_entries(data)
    if intact and data.endswith((b"\n]\n", b"[]\n")):
        return entries
    if not intact and data.strip():
        damaged = _free_name(path)
        damaged.write_bytes(data)
        _log.warning(
            "%s was damaged: kept %d complete entries, and a copy as %s", path, len(entries), damaged
        )
    write_entries(path, entries)
    return entries


def _free_name(path: Path) -> Path:
    candidate = path.with_name(f"{path.name}.damaged")
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.damaged-{number}")
    return candidate


def _step(entry: LogEntry) -> float:
    step = entry.get("global_step")
    return step if isinstance(step, int | float) else 0
