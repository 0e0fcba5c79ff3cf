"""Callbacks that show log records as a progress table and write them to a JSON file."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from ..display import (
    FINAL_METRICS,
    STEP_COLUMNS,
    ColumnOverrides,
    ProgressTable,
    format_value,
    merge_columns,
    render_summary,
)
from ..logs.log_file import (
    LOG_FILENAME,
    LogEntry,
    append_entry,
    is_evaluation,
    is_final,
    parse_entries,
    write_entries,
)
from . import EventHandlers, LoggingArguments, ProgressState

if TYPE_CHECKING:
    from tqdm import tqdm

_logger = logging.getLogger("perf_metrics")

# What trainers add to the metrics of an evaluation to tell where it was.
_POSITION = ("epoch", "num_input_tokens_seen")

OutputStream: TypeAlias = Literal["stdout", "stderr"] | TextIO | None


class ProgressCallback(EventHandlers):
    """Shows log records as a table, evaluations as single lines, and a summary at the end.

    It computes nothing: a column appears when the record has its key. Only the process with world rank 0
    prints. Columns by default: `step`, `epoch`, `loss`, `learning_rate`, `grad_norm`, `tok_per_sec`, `mfu`,
    `peak_mem`.

    Args:
        use_tqdm: True: a bar on stderr below the table. False: lines only. None: a bar if stderr is a
            terminal, or in a notebook, which shows its own kind of bar.
        output_stream: Where the lines go: "stdout" (also None), "stderr" or a text stream.
        step_columns: Overrides of the columns by name: some fields of a `ColumnSpec`, a whole one, or None to
            remove the column. New names are appended.
        final_metrics: The same for the closing summary.
        header_interval: Rows between two headers.

    Raises:
        ValueError: An override or `header_interval` is out of range, or `output_stream` is not a stream.
    """

    def __init__(
        self,
        use_tqdm: bool | None = None,
        output_stream: OutputStream = None,
        step_columns: ColumnOverrides | None = None,
        final_metrics: ColumnOverrides | None = None,
        header_interval: int = 20,
    ) -> None:
        if header_interval < 1:
            raise ValueError(f"header_interval={header_interval!r} must be 1 or more.")
        if output_stream not in (None, "stdout", "stderr") and not hasattr(output_stream, "write"):
            raise ValueError(f'output_stream={output_stream!r} must be "stdout", "stderr" or a text stream.')
        self._use_tqdm = use_tqdm
        self._output_stream = output_stream
        self._final_columns = merge_columns(FINAL_METRICS, final_metrics)
        self._table = ProgressTable(merge_columns(STEP_COLUMNS, step_columns), header_interval)
        self._bar: tqdm[object] | None = None
        self._reader_gone = False

    def on_train_begin(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """Open the bar, at the step where the run resumes."""
        if not state.is_world_process_zero:
            return
        self._table.reserve("step", len(_step_text(state.max_steps, state.max_steps)))
        if self._use_tqdm or (self._use_tqdm is None and (sys.stderr.isatty() or _in_notebook())):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that without ipywidgets it is a bar of characters
                from tqdm.auto import tqdm

            total = state.max_steps if state.max_steps > 0 else None
            self._bar = tqdm(
                total=total, initial=state.global_step, unit="step", dynamic_ncols=True, file=sys.stderr
            )

    def on_step_end(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self, args: object, state: ProgressState, control: object, *, logs: Mapping[str, object], **_: object
    ) -> None:
        """Print a row, or the closing summary for the final metrics."""
        if not state.is_world_process_zero:
            return
        if is_final(logs):
            self._close_bar()
            self._print(render_summary("this session", self._final_columns, logs))
        elif not is_evaluation(logs):
            self._print(self._table.row(_with_position(logs, state)))

    def on_evaluate(
        self,
        args: object,
        state: ProgressState,
        control: object,
        *,
        metrics: Mapping[str, object],
        **_: object,
    ) -> None:
        """Print one line with the evaluation's metrics."""
        if not state.is_world_process_zero:
            return
        pairs = [_evaluation_pair(key, value) for key, value in metrics.items() if key not in _POSITION]
        self._print([self._table.note(_with_position({}, state), "  ".join([" eval", *pairs]))])

    def on_train_end(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """Close the bar."""
        self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print(self, lines: list[str]) -> None:
        """Write lines; a reader that has gone (`| head`, a closed terminal) ends the display, not the run."""
        if self._reader_gone:
            return
        stream = self._stream()
        text = "\n".join(lines)
        try:
            if self._bar is not None:
                self._bar.write(text, file=stream)
            else:
                stream.write(f"{text}\n")
            stream.flush()
        except BrokenPipeError:
            self._reader_gone = True
            _logger.warning("nobody reads the progress display any more; the run continues without it")

    def _stream(self) -> TextIO:
        # Looked up at each write: tests, notebooks and loggers replace the standard streams.
        if self._output_stream is None or self._output_stream == "stdout":
            return sys.stdout
        if self._output_stream == "stderr":
            return sys.stderr
        return self._output_stream


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: its streams are not a terminal, and show bars."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _with_position(record: Mapping[str, object], state: ProgressState) -> dict[str, object]:
    position = {"step": _step_text(state.global_step, state.max_steps), "epoch": state.epoch}
    if state.epoch is None:
        del position["epoch"]
    return {**position, **record}


def _step_text(step: int, max_steps: int) -> str:
    return f"{step}/{max_steps}" if max_steps > 0 else str(step)


def _evaluation_pair(key: str, value: object) -> str:
    name = key.removeprefix("eval_")
    return f"{name} {format_value(value, '.5f' if name.endswith('loss') else '')}"


class JsonLogger(EventHandlers):
    """Writes each log record into a JSON array in the run's log directory.

    Each entry has `global_step`, `epoch` and `timestamp` (seconds since 1970), then the record. Lists stay
    arrays; nan and infinities become null. The file is valid JSON after every entry, and appending costs the
    same however long it is. At the start of training, entries beyond the step where the run resumes are
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
            raise ValueError(
                f"filename={filename!r} must be a file name without a directory, which is args.logging_dir."
            )
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
        place = logging_dir or getattr(args, "run_path", None) or args.output_dir
        if not place:
            raise ValueError(
                f"logging_dir={logging_dir!r} must name a directory for JsonLogger. Set it, or output_dir."
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
        _logger.warning(
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
