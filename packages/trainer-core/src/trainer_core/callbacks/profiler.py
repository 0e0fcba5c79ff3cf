"""The callback that records traces with torch.profiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_env import get_logger

from ..errors import ConfigurationError
from .files import process_rank, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from torch.profiler import profile

    from ..arguments import TrainingArguments
    from ..state import TrainerControl, TrainerState

logger = get_logger(__name__)


class ProfilerCallback:
    """Records some steps with torch.profiler: a Chrome trace and a table of the top operators.

    Acts from on_train_begin, step by step: `skip_first` steps are left alone, then `repeat` times `wait`
    steps idle, `warmup` steps traced and thrown away, `active` steps recorded. After each cycle every rank
    writes into `<log directory>/profile`: `step-<n>-rank<r>.json.gz` (open it in https://ui.perfetto.dev) and
    `step-<n>-rank<r>.txt`. After the last cycle the profiler is gone and costs nothing. Steps are counted
    from where this session began. A run that ends within a cycle writes what it has.

    Args:
        wait: Steps to idle at the start of a cycle, 0 or more.
        warmup: Steps to trace and throw away, 0 or more; tracing is slow at first.
        active: Steps to record, 1 or more.
        repeat: Number of cycles, 1 or more.
        skip_first: Steps before the first cycle, 0 or more.
        record_shapes: Record the shapes of operator inputs.
        with_stack: Record Python stacks; costs much time and memory.
        profile_memory: Record allocations.
        top: Rows of the table, 1 or more.

    Raises:
        ConfigurationError: A number is out of range.
    """

    name = "profiler"

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
    ) -> None:
        least = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1, "skip_first": 0, "top": 1}
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
                raise ConfigurationError(setting, value, f"must be {least[setting]} or more", "raise it")
        self._cycle = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._skip_first = skip_first
        self._record_shapes = record_shapes
        self._with_stack = with_stack
        self._profile_memory = profile_memory
        self._top = top
        self._steps_left = 0
        self._step = 0
        self._directory: Path | None = None
        self._profile: profile | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Start the schedule."""
        from torch.profiler import profile, schedule, supported_activities

        cycle = self._cycle
        self._steps_left = self._skip_first + cycle["repeat"] * (
            cycle["wait"] + cycle["warmup"] + cycle["active"]
        )
        self._step = state.global_step
        self._directory = args.log_path / "profile"
        self._profile = profile(
            activities=supported_activities(),  # type: ignore[no-untyped-call]
            schedule=schedule(skip_first=self._skip_first, **cycle),
            on_trace_ready=self._write,
            record_shapes=self._record_shapes,
            with_stack=self._with_stack,
            profile_memory=self._profile_memory,
        )
        self._profile.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Move the schedule on by one step."""
        if self._profile is None:
            return
        self._step = state.global_step
        self._steps_left -= 1
        if self._steps_left > 0:
            self._profile.step()
        else:
            self._stop()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Stop; a cycle that is being recorded is written."""
        if self._profile is not None:
            self._stop()

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, finished: profile) -> None:
        if self._directory is None:
            raise RuntimeError("on_train_begin comes before the first trace")
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._directory / f"step-{self._step:08d}-rank{process_rank()}.json.gz"
        finished.export_chrome_trace(str(trace))
        averages = finished.key_averages(group_by_input_shape=self._record_shapes)
        on_device = any(row.self_device_time_total > 0 for row in averages)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=self._top)
        write_text(trace.with_name(trace.name.removesuffix(".json.gz") + ".txt"), table + "\n")
        logger.info("profile of the steps to %d: %s", self._step, trace)
