"""The callbacks that record traces with torch.profiler and the history of device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.autograd import profiler as autograd_profiler

from dist_env import get_logger

from ..errors import ConfigurationError
from .files import process_rank, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from torch.profiler import ProfilerAction, profile

    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

logger = get_logger(__name__)


class ProfilerCallback:
    """Records some steps with torch.profiler: a Chrome trace and a table of the top operators.

    Acts from on_train_begin, step by step: `skip_first` steps are left alone, then `repeat` times `wait`
    steps idle, `warmup` steps traced and thrown away, `active` steps recorded. After each cycle every rank
    writes into `<log directory>/profile`: `step-<n>-rank<r>.json.gz` (open it in https://ui.perfetto.dev) and
    `step-<n>-rank<r>.txt`. After the last cycle the profiler is gone and costs nothing. Steps are counted
    from where this session began. A run that ends or fails within a cycle writes what it has. A trace that
    cannot be written is warned of; training goes on without the profiler.

    It also records while a job runs: when a callback sets `control.should_profile`, or somebody writes
    "profile" into the file of an `ExternalControl`, all ranks record the same steps, `warmup` and `active` of
    them from the next one on. With `repeat=0` that is all that it does, and a step costs nothing until then.
    A request while planned cycles idle takes their place, and those that are left are given up; a request
    while steps are traced waits until they are written.

    torch has one profiler at a time in a process. Where another one is at work, this one warns and does not
    start: planned cycles are skipped, and a request is dropped.

    `perf-metrics trace <log directory>` tells what the recorded steps were spent on.

    Args:
        wait: Steps to idle at the start of a cycle, 0 or more.
        warmup: Steps to trace and throw away, 0 or more; tracing is slow at first.
        active: Steps to record, 1 or more.
        repeat: Number of cycles, 0 or more; 0 records only when it is asked to.
        skip_first: Steps before the first cycle, 0 or more.
        record_shapes: Record the shapes of operator inputs.
        with_stack: Record Python stacks; costs much time and memory.
        profile_memory: Record allocations.
        top: Rows of the table, 1 or more.
        below_ofu: Also record when the `ofu` of the log falls below this share, such as 0.3; again only after
            it has been above. None leaves it alone.

    Raises:
        ConfigurationError: A number is out of range.
    """

    name = "profiler"

    _active: ClassVar[ProfilerCallback | None] = None
    """The one of this process that has a profiler; a second profiler ends the process."""

    def __init__(
        self,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        skip_first: int = 10,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        top: int = 25,
        below_ofu: float | None = None,
    ) -> None:
        least = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0, "top": 1}
        given = {
            "wait": wait,
            "warmup": warmup,
            "active": active,
            "repeat": repeat,
            "skip_first": skip_first,
            "top": top,
        }
        for setting, value in given.items():
            if value < least[setting]:
                raise ConfigurationError(
                    setting, value, f"must be {least[setting]} or more", f"set it to {least[setting]} or more"
                )
        if below_ofu is not None and not 0 < below_ofu <= 1:
            raise ConfigurationError(
                "below_ofu", below_ofu, "must be a share between 0 and 1", "give a share, such as 0.3"
            )
        self._cycle = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._skip_first = skip_first
        self._record_shapes = record_shapes
        self._with_stack = with_stack
        self._profile_memory = profile_memory
        self._top = top
        self._below_ofu = below_ofu
        self._was_below_ofu = False
        self._steps_left = 0
        self._step = 0
        self._directory: Path | None = None
        self._profile: profile | None = None
        self._when: Callable[[int], ProfilerAction] | None = None
        self._asked = False
        self._may_write = True
        self._written_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the schedule."""
        from torch.profiler import schedule

        self._stop_safely()  # of a call before that ended in a way that fired no event
        self._asked = False
        self._written_step = None
        self._step = state.global_step
        self._directory = args.log_path / "profile"
        cycle = self._cycle
        if cycle["repeat"]:
            steps = cycle["repeat"] * (cycle["wait"] + cycle["warmup"] + cycle["active"])
            self._start(
                schedule(skip_first=self._skip_first, **cycle),
                self._skip_first + steps,
                "the planned profile is skipped",
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Record from this step on, if that was asked for.

        The trainer makes the flag the same on all ranks at the end of a step, so they begin together.
        """
        from torch.profiler import schedule

        if control.should_profile:
            control.should_profile = False
            self._asked = True
            if not self._idles():
                logger.info(
                    "a profile was asked for at step %d, and one is under way; it is recorded after that",
                    state.global_step,
                )
        if not self._asked or not self._idles():
            return
        self._asked = False
        warmup, active = self._cycle["warmup"], self._cycle["active"]
        when = schedule(wait=0, warmup=warmup, active=active, repeat=1)
        if self._start(when, warmup + active, "the profile that was asked for is dropped"):
            logger.info("recording a profile of %d steps after step %d", active, state.global_step + warmup)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: Mapping[str, object],
        **_: object,
    ) -> None:
        """Ask for a profile when OFU falls below the threshold."""
        ofu = logs.get("ofu")
        if self._below_ofu is None or not isinstance(ofu, int | float):
            return
        below = ofu < self._below_ofu
        if below and not self._was_below_ofu:
            logger.warning(
                "ofu is %.1f%%, below below_ofu=%g: a profile is recorded", 100 * ofu, self._below_ofu
            )
            control.should_profile = True
        self._was_below_ofu = below

    def _start(self, when: Callable[[int], ProfilerAction], steps: int, otherwise: str) -> bool:
        """Start a profiler, unless there is another; say then what becomes of this one."""
        from torch.profiler import profile, supported_activities

        if self._is_barred(otherwise):
            return False
        if self._profile is not None:
            logger.info("the planned profile is given up for the one that was asked for")
            self._stop()
        self._steps_left = steps
        self._when = when
        self._may_write = True
        self._profile = profile(
            activities=supported_activities(),
            schedule=when,
            on_trace_ready=self._write,
            record_shapes=self._record_shapes,
            with_stack=self._with_stack,
            profile_memory=self._profile_memory,
        )
        ProfilerCallback._active = self
        self._profile.start()
        return True

    def _is_barred(self, otherwise: str) -> bool:
        if ProfilerCallback._active not in (None, self):
            reason = "another ProfilerCallback of this process has a profiler"
        # Private in torch 2.11 to 2.13, and without a public equal. A torch without it may still meet two.
        elif getattr(autograd_profiler, "_is_profiler_enabled", False):
            reason = "another profiler is at work in this process"
        else:
            return False
        logger.warning("%s: %s, and torch allows one at a time", otherwise, reason)
        return True

    def _idles(self) -> bool:
        """Whether nothing is traced now: there is no profiler, or its schedule skips or waits."""
        from torch.profiler import ProfilerAction

        return self._profile is None or self._profile.current_action is ProfilerAction.NONE

    def _begins_to_trace(self) -> bool:
        """Whether the profiler idles in this step, and traces the next one."""
        from torch.profiler import ProfilerAction

        if self._profile is None or self._when is None or not self._idles():
            return False
        return self._when(self._profile.step_num + 1) is not ProfilerAction.NONE

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Move the schedule on by one step."""
        if self._profile is None:
            return
        self._step = state.global_step
        self._steps_left -= 1
        # The profiler's next step would be in the trace, though the run has none.
        ends = control.ends_run or 0 <= state.max_steps <= state.global_step
        ends = ends or self._steps_left <= 0
        # Somebody may have started a profiler while this one idled.
        if ends or (self._begins_to_trace() and self._is_barred("the planned profile is given up")):
            self._stop()
        else:
            self._profile.step()
            if not self._may_write:
                self._stop()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stop; a cycle that is being recorded is written."""
        self._stop()
        if self._asked or control.should_profile:
            self._asked = control.should_profile = False
            logger.info(
                "a profile was asked for, and nothing is recorded: the run ends before it could begin"
            )

    def on_exception(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stop, because a process that exits with a running profiler crashes; write what there is."""
        self._stop_safely()

    def _stop_safely(self) -> None:
        """Stop where an error must not come in the way of what the caller is about."""
        try:
            self._stop()
        except (OSError, RuntimeError, AssertionError) as error:
            logger.warning("the profiler could not be stopped: %r", error)

    def _stop(self) -> None:
        if self._profile is None:
            return
        try:
            self._profile.stop()
        finally:
            self._profile = self._when = None
            ProfilerCallback._active = None

    def _write(self, finished: profile) -> None:
        """Write the trace and the table; a failure is told, and ends the profiler instead of the run."""
        if self._directory is None:
            raise RuntimeError("on_train_begin comes before the first trace.")
        # A cycle that has no whole step yet would overwrite the one before it.
        if not self._may_write or self._step == self._written_step:
            return
        trace = self._directory / f"step-{self._step:08d}-rank{process_rank()}.json.gz"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(trace))
            averages = finished.key_averages(group_by_input_shape=self._record_shapes)
            on_device = any(row.self_device_time_total > 0 for row in averages)
            order = "self_device_time_total" if on_device else "self_cpu_time_total"
            table = averages.table(sort_by=order, row_limit=self._top)
            write_text(trace.with_name(trace.name.removesuffix(".json.gz") + ".txt"), table + "\n")
        except (OSError, RuntimeError) as error:
            # The profiler calls this in the middle of its own work, so that it is stopped only afterwards.
            self._may_write = False
            logger.warning("the profile %s could not be written: %s; training goes on without", trace, error)
            return
        self._written_step = self._step
        logger.info("profile of the steps to %d: %s", self._step, trace)


class MemorySnapshotCallback:
    """Records every allocation of the CUDA allocator during some steps, for https://pytorch.org/memory_viz.

    Acts at on_step_begin of `first_step` and on_step_end of `last_step` (steps count from 1; both are
    recorded): every rank writes `<log directory>/memory/steps-<a>-<b>-rank<r>.pickle`. A run that ends before
    `last_step` writes what it has. A session that resumes within the range records the rest of it. Without
    CUDA it says once that it is unavailable, and does nothing.

    The snapshot is a pickle, PyTorch's own format: open only those that you trust.

    Args:
        first_step: First step to record, 1 or more.
        last_step: Last step to record.
        max_entries: Allocations and frees to keep, the newest; each takes some kilobytes of host memory.

    Raises:
        ConfigurationError: A number is out of range.
    """

    name = "memory_snapshot"

    def __init__(self, first_step: int = 3, last_step: int = 5, *, max_entries: int = 100_000) -> None:
        if first_step < 1:
            raise ConfigurationError("first_step", first_step, "must be 1 or more", "set it to 1 or more")
        if last_step < first_step:
            raise ConfigurationError(
                "last_step",
                last_step,
                f"is before first_step={first_step}",
                f"set it to {first_step} or more",
            )
        if max_entries < 1:
            raise ConfigurationError("max_entries", max_entries, "must be 1 or more", "set it to 1 or more")
        self._first_step = first_step
        self._last_step = last_step
        self._max_entries = max_entries
        self._begun_at: int | None = None
        self._available = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Say so where there is nothing to record."""
        reason = why_unavailable()
        self._available = reason is None
        if reason is not None:
            logger.warning("MemorySnapshotCallback is unavailable: %s", reason)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Begin to record, when it is time."""
        step = state.global_step + 1
        if self._available and self._begun_at is None and self._first_step <= step <= self._last_step:
            torch.cuda.memory._record_memory_history(max_entries=self._max_entries)
            self._begun_at = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Write the snapshot after the last step."""
        if self._begun_at is not None and state.global_step >= self._last_step:
            self._finish(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Write what there is, if the run ended early."""
        if self._begun_at is not None:
            self._finish(args, state)

    def _finish(self, args: TrainingArguments, state: TrainerState) -> None:
        steps = f"steps-{self._begun_at:08d}-{state.global_step:08d}"
        path = args.log_path / "memory" / f"{steps}-rank{process_rank()}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        self._begun_at = None
        logger.info("memory snapshot: %s", path)


def why_unavailable() -> str | None:
    """Why the CUDA allocator's history cannot be had here; None if it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


@contextmanager
def dump_on_oom(directory: str | Path) -> Iterator[None]:
    """Write what holds the device's memory when it runs out, then raise the error again.

    Every rank that runs out writes `oom-rank<r>.txt`, the allocator's summary, and `oom-rank<r>.pickle`, a
    snapshot for https://pytorch.org/memory_viz; it has a history of allocations only if a
    `MemorySnapshotCallback` is recording one. Without CUDA the text says why there is no summary. A failure
    to write is logged, and does not hide the error.

    Args:
        directory: Where to write; made if need be.

    Raises:
        torch.OutOfMemoryError: That of the body.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            report = _write_oom_report(Path(directory), error)
            logger.error("out of memory; what held it: %s", report)
        except (OSError, RuntimeError) as failure:
            logger.error("out of memory, and the report could not be written: %r", failure)
        raise


def _write_oom_report(directory: Path, error: torch.OutOfMemoryError) -> Path:
    report = directory / f"oom-rank{process_rank()}.txt"
    reason = why_unavailable()
    summary = torch.cuda.memory_summary() if reason is None else f"memory summary unavailable: {reason}"
    write_text(report, f"{error}\n\n{summary}\n")
    if reason is None:
        torch.cuda.memory._dump_snapshot(str(report.with_suffix(".pickle")))
    return report
