"""The progress display of a run: a table of log records, and a bar where there is a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from ..display.columns import FINAL_METRICS, STEP_COLUMNS, ColumnOverrides, merge_columns
from ..display.format import format_value
from ..display.table import ProgressTable, render_summary
from ..records import is_evaluation, is_final
from .events import EventHandlers, ProgressState

if TYPE_CHECKING:
    from tqdm import tqdm  # type: ignore[import-untyped]

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
            terminal.
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
            raise ValueError(f"header_interval={header_interval!r}: must be 1 or more")
        if output_stream not in (None, "stdout", "stderr") and not hasattr(output_stream, "write"):
            raise ValueError(f'output_stream={output_stream!r}: must be "stdout", "stderr" or a text stream')
        self._use_tqdm = use_tqdm
        self._output_stream = output_stream
        self._final_columns = merge_columns(FINAL_METRICS, final_metrics)
        self._table = ProgressTable(merge_columns(STEP_COLUMNS, step_columns), header_interval)
        self._bar: tqdm[object] | None = None
        self._reader_gone = False

    def on_train_begin(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """Open the bar, at the step where the run goes on."""
        if not state.is_world_process_zero:
            return
        self._table.reserve("step", len(_step_text(state.max_steps, state.max_steps)))
        if self._use_tqdm or (self._use_tqdm is None and sys.stderr.isatty()):
            from tqdm import tqdm

            total = state.max_steps if state.max_steps > 0 else None
            self._bar = tqdm(
                total=total, initial=state.global_step, unit="step", dynamic_ncols=True, file=sys.stderr
            )

    def on_step_end(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: object,
        state: ProgressState,
        control: object,
        *,
        logs: Mapping[str, object],
        **_: object,
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
            _logger.warning("nobody reads the progress display any more; the run goes on without it")

    def _stream(self) -> TextIO:
        # Looked up at each write: tests, notebooks and loggers replace the standard streams.
        if self._output_stream is None or self._output_stream == "stdout":
            return sys.stdout
        if self._output_stream == "stderr":
            return sys.stderr
        return self._output_stream


def _with_position(record: Mapping[str, object], state: ProgressState) -> dict[str, object]:
    position = {"step": _step_text(state.global_step, state.max_steps), "epoch": state.epoch}
    if state.epoch is None:
        del position["epoch"]
    return {**position, **record}


def _step_text(step: int, max_steps: int) -> str:
    return f"{step}/{max_steps}" if max_steps > 0 else str(step)


def _evaluation_pair(key: str, value: object) -> str:
    name = key.removeprefix("eval_")
    text = "n/a" if value is None else format_value(value, ".5f" if name.endswith("loss") else "")
    return f"{name} {text}"
