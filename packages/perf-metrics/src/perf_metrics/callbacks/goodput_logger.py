"""A callback that records what each session of a run spends its time on, so that goodput can be told."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from ..logs.goodput import GOODPUT_FOLDER, Kind
from ..throughput import COMPILE_PHASE, ThroughputMeter, exclude_compilation
from ..utilization import has_process_group
from . import EventHandlers, LoggingArguments, ProgressState, run_path

_logger = logging.getLogger("perf_metrics")
_SIGN_OF_LIFE_SECONDS = 1.0
"""The last line is never older while the process lives, whatever it does."""
_AT_MOST_EVERY_SECONDS = 0.1
"""Between two events that write it: a step of a small model takes less than a millisecond."""
_LIVE_KINDS: tuple[Kind, ...] = ("steps", "start", "compilation", "data", "evaluation", "saving", "other")
"""What can be told while a session lasts; that steps are lost, or a run down, shows at the next start."""
_began_before = False
"""Whether this process has recorded a session: its start-up belongs to the first one."""


class GoodputLogger(EventHandlers):
    """Writes a small file for each session of a run, which `read_goodput` makes one account of.

    A session is one call of `train` in one start of the job. Its file, in the folder `goodput` of
    `args.output_dir`, tells when it started, how many ranks it had, at which step it began, at which steps it
    saved, and in its last line, which is replaced every second, how far it came and what its time was spent
    on. After a kill at any instant that line is at most about a second old. Only rank 0 writes; where it
    cannot, as on a full disk, it warns once, and training continues.

    The time between two events is judged by the event at its end, as `IntervalCounts` does: up to
    `on_step_begin` it was waiting for data, up to `on_step_end` a step, up to `on_prediction_step` and
    `on_evaluate` evaluation, up to `on_save` saving. What torch.compile compiles meanwhile is counted apart.
    Times are those of the host: work that is queued on a device counts where the host waits for it.

    Args:
        clock: Returns seconds from any fixed origin and never goes back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._file: _SessionFile | None = None

    def device_seconds(self) -> dict[Kind, float]:
        """Return what the device time of this training was spent on so far, in seconds of all ranks.

        From its start, that of the process included for the first one, to the last event: while it hangs,
        nothing is added. Empty outside of a training, and on other ranks.
        """
        file = self._file  # another thread may ask while a training ends
        return {} if file is None else file.device_seconds()

    def on_train_begin(
        self, args: LoggingArguments, state: ProgressState, control: object, **_: object
    ) -> None:
        """Begin a session."""
        if state.is_world_process_zero:
            folder = (run_path(args) / GOODPUT_FOLDER).absolute()
            if (before := _open.pop(folder, None)) is not None:
                before.close("exception")  # of which nobody told
            self._file = _open[folder] = _SessionFile(folder, state.global_step, self._clock)

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """The batches are there."""
        if self._file is not None:
            self._file.ended("data")

    def on_step_end(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """A step is done, or queued."""
        if self._file is not None:
            self._file.ended("steps", step=state.global_step)

    def on_prediction_step(self, args: object, state: object, control: object, **_: object) -> None:
        """A batch of an evaluation is done."""
        if self._file is not None:
            self._file.ended("evaluation")

    def on_evaluate(self, args: object, state: object, control: object, **_: object) -> None:
        """An evaluation is done."""
        if self._file is not None:
            self._file.ended("evaluation")

    def on_save(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """A checkpoint is saved, or its weights are copied for that."""
        if self._file is not None:
            self._file.saved(state.global_step)

    def on_memory_save(self, args: object, state: ProgressState, control: object, **_: object) -> None:
        """A checkpoint is saved that a restart within the job may continue from."""
        if self._file is not None:
            self._file.saved_in_memory(state.global_step)

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """End the session."""
        self._close("end")

    def on_exception(self, args: object, state: object, control: object, **_: object) -> None:
        """End the session where an exception ended training; its last step is not known to be done."""
        self._close("exception")

    def _close(self, how: str) -> None:
        if self._file is not None:
            _open.pop(self._file.folder, None)
            self._file.close(how)
            self._file = None


class _SessionFile:
    """The file of one session; its last line is replaced until the session ends.

    A file that cannot be written leaves the account incomplete, which is said once, and training alone.
    """

    def __init__(self, folder: Path, step: int, clock: Callable[[], float]) -> None:
        now = time.time()
        self._path = (
            folder / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now))}.{int(now * 1e6) % 10**6:06}"
        )
        self._path = self._path.with_name(f"{self._path.name}-{os.getpid()}.jsonl")
        self._lock = threading.Lock()
        self.closed = threading.Event()
        self._told = False
        self._file: FileIO | None = None
        self._end, self._kept = 0, b""
        self._step, self._written = step, now
        self._seconds: dict[Kind, float] = {}
        self._has_data = False
        self._in_memory: dict[int, Mapping[Kind, float]] = {}
        started, self._ranks = _started(now), _ranks()
        self._before = now - started
        begin = {"event": "begin", "time": now, "started": started, "ranks": self._ranks, "step": step}
        self._keep(begin)
        self._write_last("alive")
        self._meter = ThroughputMeter(clock)
        self._compiling = ExitStack()
        # A weak reference: a run that is dropped without an end gives no signs of life any more.
        threading.Thread(target=_keep_alive, args=(weakref.ref(self),), name="goodput", daemon=True).start()

    @property
    def folder(self) -> Path:
        """Where it is, however that is written."""
        return self._path.parent.absolute()

    def device_seconds(self) -> dict[Kind, float]:
        """Return the seconds of all ranks by kind so far."""
        with self._lock:
            # All kinds from the beginning: a counter that appears with its first value never grew to it.
            told: dict[Kind, float] = {**dict.fromkeys(_LIVE_KINDS, 0.0), **self._seconds}
        told["start"] = told.get("start", 0.0) + self._before
        return {kind: seconds * self._ranks for kind, seconds in told.items()}

    def ended(self, kind: Kind, step: int | None = None) -> None:
        """What was done since the last call has ended, and was of this kind."""
        lap = self._meter.lap()
        if kind == "data" and not self._has_data:
            kind, self._has_data = "start", True  # workers start, and read up to where the run resumes
        with self._lock:
            self._add(kind, lap.net_seconds)
            self._add("compilation", lap.phases.get(COMPILE_PHASE, 0.0))
            self._step = self._step if step is None else step
            if time.time() - self._written > _AT_MOST_EVERY_SECONDS:
                self._write_last("alive")
        if "torch._dynamo" in sys.modules and not self.closed.is_set():
            self._leave_out_compilation()

    def saved(self, step: int) -> None:
        """A checkpoint of a step was saved."""
        self.ended("saving")
        with self._lock:
            self._keep({"event": "save", "time": time.time(), "step": step, "seconds": self._seconds})
            self._write_last("alive")

    def saved_in_memory(self, step: int) -> None:
        """A checkpoint of a step was saved in memory, where the two newest stay."""
        self.ended("saving")
        with self._lock:
            # In the last line, which is replaced: they come too often for a line of their own.
            self._in_memory = {**dict([*self._in_memory.items()][-1:]), step: self._rounded()}
            self._write_last("alive")

    def close(self, how: str) -> None:
        """The session has ended; what came behind its last step or save is its end."""
        if not self.closed.is_set():
            if how == "end":
                self.ended("other")
            with self._lock:
                self.closed.set()
                self._write_last(how)
                if self._file is not None:
                    self._file.close()
        self._compiling.close()

    def give_sign_of_life(self) -> bool:
        """Replace the last line; False when the session has ended."""
        with self._lock:
            if not self.closed.is_set():
                self._write_last("alive")
        return not self.closed.is_set()

    def _leave_out_compilation(self) -> None:
        # Not before the compiler is there: loading it takes seconds.
        if not self._has_compiler:
            self._has_compiler = True
            self._compiling.enter_context(exclude_compilation(self._meter))

    _has_compiler = False

    def _add(self, kind: Kind, seconds: float) -> None:
        if seconds > 0:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def _rounded(self) -> Mapping[Kind, float]:
        return {kind: round(value, 3) for kind, value in self._seconds.items()}

    def _keep(self, line: Mapping[str, object]) -> None:
        """Have a line that stays written with the next one."""
        self._kept += _encoded(line)

    def _write_last(self, event: str) -> None:
        """Write the lines that stay, and the last one in the place of the one before; the lock is held."""
        self._written = time.time()
        last: dict[str, object] = {"event": event, "time": self._written, "step": self._step}
        last["seconds"] = self._rounded()
        if self._in_memory:
            last["memory"] = [{"step": step, "seconds": spent} for step, spent in self._in_memory.items()]
        data = self._kept + _encoded(last)
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = FileIO(self._path, "x+")
            # One call as a rule: a kill leaves the old line or the new one, and a torn rest of a longer one.
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], self._end + done)
            os.truncate(self._file.fileno(), self._end + len(data))
        except OSError as error:
            if not self._told:
                self._told = True
                _logger.warning(
                    "the account of this session's time is not complete: %s cannot be written: %s",
                    self._path,
                    error,
                )
            return
        self._end += len(self._kept)
        self._kept = b""


def _encoded(line: Mapping[str, object]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _keep_alive(session: weakref.ReferenceType[_SessionFile]) -> None:
    while (own := session()) is not None and own.give_sign_of_life():
        closed = own.closed
        del own
        closed.wait(_SIGN_OF_LIFE_SECONDS)


_open: weakref.WeakValueDictionary[Path, _SessionFile] = weakref.WeakValueDictionary()
"""The open session of each folder: the next one in this process ends it, if an exception has not."""


def _ranks() -> int:
    if has_process_group():
        import torch

        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _started(now: float) -> float:
    """When this process was started, for its first session; for another one in the same process: now."""
    global _began_before
    if _began_before:
        return now
    _began_before = True
    try:
        # Linux: field 22 of stat is the start in ticks after booting; the name before may have blanks.
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        running = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now  # another system: start-up is not known
    return now - max(0.0, running)
