"""Starting the processes of a job on this machine, when no launcher has.

As torchrun does it, with its variables, but for three things. The ranks die with the launcher, also when it
is killed. They meet at a store that listens on this machine only, and of which nothing is unpickled; torchrun
with `--rdzv-backend c10d` unpickles what anybody on the network may have put into its store. And a signal
that comes again stops the job at once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, Literal

from .console import (
    EXIT_ABORTED,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    EXIT_USER_ERROR,
    PROG,
    WITHOUT_FRESH_START,
)
from .restarts import Restarts
from .spare import Spares

EXIT_CODES_VARIABLE = "LLAMA_PRETRAIN_EXIT_CODES"
"""Names a folder in which each rank leaves its exit code, for a script whose launcher does not tell it:
torchrun that was told to stop does not wait for the ranks, and ends with a code of its own."""
REPORT_VARIABLE = "LLAMA_PRETRAIN_REPORT_FD"
"""Names the pipe on which each rank tells its launcher what it ends of."""

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOOK_SECONDS = 0.05
_LEASE_LOOK_SECONDS = 0.25
_ECHO_SECONDS = 1.0
"""As for `trainer_core.StopRequests`: a signal that comes again this soon is the same one."""
_KILLED_SECONDS = 0.5
"""How long ranks live on after one was killed; it was not asked whether it had something to save."""
_FAILED_SECONDS = 5.0
"""How long ranks have to find out by themselves that one has failed, before they are asked to end."""
_FAILED_RESTART_SECONDS = 1.0
"""The same where all are started again: they have nothing to finish."""
_END_SECONDS = 60.0
"""How long they then have to finish a save."""


def is_launched() -> bool:
    """Whether a launcher, such as torchrun or a script of Slurm, has started this process."""
    return any(name in os.environ for name in _LAUNCHER_VARIABLES)


def launch(
    words: Sequence[str],
    processes: int,
    output_dir: str,
    *,
    max_restarts: int = 0,
    hot_spares: bool = False,
    fresh: bool = False,
) -> int:
    """Start the same command in so many processes, and wait for them.

    A signal is passed on to them: each finishes its step, they save together and end. The same signal again
    kills them. When one fails, the others are ended. While they start up, which takes seconds, it is watched
    whether another run takes their output directory.

    A rank that is lost, by a signal or an error that is not of the input, ends the others as well; then all
    are started again, and continue from their newest checkpoint.

    Args:
        words: The command line, without the program's name.
        processes: How many, all on this machine.
        output_dir: The output directory that the command line names.
        max_restarts: How often they are started again, at most.
        hot_spares: Whether to keep processes ready for that, which have imported torch.
        fresh: Whether the command line asks for a fresh start, which the command that continues leaves out.

    Returns:
        The exit code of the job: that of all processes if they agree; 130 if it was stopped at once, or
        before there was anything to save; else 2 if one says that the input is wrong, and 1 if not.

    Raises:
        ConfigurationError: If another run of this machine owns the output directory; nothing is left then.
        OSError: If the output directory cannot be read.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    job = _Job(words, output_dir, processes, Restarts(max_restarts), hot_spares=hot_spares, fresh=fresh)
    before = {number: signal.signal(number, job.remember) for number in _SIGNALS}
    try:
        refuse_if_in_use(output_dir)
        job.start()
        job.wait()
        while job.begins_restart():
            job.start()
            job.wait()
    finally:
        job.kill()
        job.close()
        _Job.has_ended = True
        for number, handler in before.items():
            signal.signal(number, handler)
    return job.conclude()


def refuse_if_in_use(output_dir: str, own: Collection[int] = ()) -> None:
    """Refuse a directory whose run has certainly not ended, before any work; the lease has the last word.

    Args:
        output_dir: The directory, which need not exist.
        own: Processes of this machine that may hold it.

    Raises:
        ConfigurationError: Naming the process that holds it.
        OSError: If the directory cannot be read.
    """
    # Imported here: the other commands need neither.
    from checkpoint_core import find_lease_holder
    from trainer_core import ConfigurationError

    holder = find_lease_holder(output_dir)
    if holder is not None and holder.is_here() and holder.pid not in own:
        raise ConfigurationError(
            "output_dir",
            output_dir,
            f"is in use by {holder.describe()}",
            "wait until that run has ended, stop it, or choose another output_dir",
        )


def has_launched() -> bool:
    """Whether this process was the launcher of a job, which has ended."""
    return _Job.has_ended


def leave_exit_code(code: int) -> int:
    """Leave the exit code of this rank where a script looks for it, and return it."""
    folder = os.environ.get(EXIT_CODES_VARIABLE)
    if folder is not None and is_launched() and Path(folder).is_dir():
        (Path(folder) / os.environ["RANK"]).write_text(str(code), encoding="ascii")
    return code


def report_ownership() -> None:
    """Tell the launcher, if it is ours, that the ranks own their output directory."""
    _report("owns")


def report_end(text: str, *, is_cause: bool, code: int = EXIT_ABORTED) -> None:
    """Tell the launcher, if it is ours, what this rank ends of; the end of another is not a cause."""
    _report("cause" if is_cause else "consequence", text, code)


def report_begin(step: int, checkpoint: str) -> None:
    """Tell the launcher, if it is ours, at which step training begins, and from which checkpoint."""
    _report("begins", checkpoint, step)


def report_step(step: int) -> None:
    """Tell the launcher, if it is ours and restarts ranks, that a step is done."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        _report("step", value=step)


def _report(kind: _Kind, text: str = "", value: int = 0) -> None:
    if is_reporting():
        rank = int(os.environ["RANK"])
        # A longer line could be mixed with that of another rank, or torn where this one is killed.
        while len(line := json.dumps(asdict(_Report(rank, kind, text, value))) + "\n") > select.PIPE_BUF:
            text = text[: len(text) * 3 // 4]
        os.write(int(os.environ[REPORT_VARIABLE]), line.encode())


def is_reporting() -> bool:
    """Whether this is a rank of our own launcher, which says for all of them how the job ended."""
    return REPORT_VARIABLE in os.environ and is_launched()


_Kind = Literal["owns", "begins", "step", "cause", "consequence"]
"""What a rank reports: that the output directory is the run's own; where training begins, and each step; or
what it ends of, itself or another."""


@dataclass(frozen=True)
class _Report:
    rank: int
    kind: _Kind
    text: str
    value: int
    """The step; or the exit code."""


class _Job:
    """The ranks, and what they were told and told."""

    has_ended: ClassVar[bool] = False

    def __init__(
        self,
        words: Sequence[str],
        output_dir: str,
        processes: int,
        restarts: Restarts,
        *,
        hot_spares: bool,
        fresh: bool,
    ) -> None:
        from checkpoint_core import LAUNCHER_VARIABLE
        from trainer_core import LAUNCH_VARIABLE

        self._words = list(words)
        self._output_dir = output_dir
        self._processes = processes
        self._restarts = restarts
        self._fresh = fresh
        self._report_pipe, self._report_fd = os.pipe()
        os.set_blocking(self._report_pipe, False)
        self._is_closed = False
        self._variables = {
            # What a torchrun above has left would make the ranks look for another launcher than this one.
            **{name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"},
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            # The store is the launcher's, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": str(restarts.most),
            LAUNCHER_VARIABLE: str(os.getpid()),
            # This process may launch another job later, in the same output directory.
            LAUNCH_VARIABLE: f"{os.getpid()}-{time.time_ns()}",
            REPORT_VARIABLE: str(self._report_fd),
        }
        self._spares = Spares(self._variables, self._report_fd) if hot_spares and restarts.most else None
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._received: list[tuple[int, float]] = []
        self._received_at: dict[int, float] = {}
        self._stopped_at_once = False
        self._forget()

    def _forget(self) -> None:
        """Forget what the ranks of the start before have told."""
        self._looked_at = time.monotonic()
        self._first_failed: int | None = None
        self._failed_at = 0.0
        self._asked_to_end = False
        self._reports: list[_Report] = []

    def remember(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        # With its time: while the ranks start it is not looked at, and a later one is not its echo.
        self._received.append((number, time.monotonic()))

    def start(self) -> None:
        """Start the ranks, each in a session of its own: Ctrl-C comes to them from here alone."""
        from dist_env import die_with_parent_command

        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listener.getsockname()[1]
        command = die_with_parent_command([sys.executable, "-m", "llama_pretrain", *self._words])
        self._ranks = []
        for rank in range(self._processes):
            own = {
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(self._restarts.done),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            }
            started = None if self._spares is None else self._spares.take(own, self._words)
            if started is None:
                started = subprocess.Popen(
                    command,
                    env=self._variables | own,
                    pass_fds=(self._report_fd,),
                    start_new_session=True,
                )
            self._ranks.append(started)
        self._restarts.note_start()
        # Behind the ranks, which import torch for as long as this process does. Who connects meanwhile waits
        # in the backlog of the socket.
        import torch.distributed as dist

        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def wait(self) -> None:
        """Wait until all have ended, or are to be killed.

        Raises:
            ConfigurationError: If another run took the output directory before these ranks did.
        """
        while None in [each.poll() for each in self._ranks]:
            while self._received:
                self._pass_on(*self._received.pop(0))
            self._look_for_failures()
            self._read_reports()
            self._look_for_another_run()
            if self._stopped_at_once or self._is_overdue():
                return
            time.sleep(_LOOK_SECONDS)
        self._look_for_failures()

    def begins_restart(self) -> bool:
        """Whether the ranks are to be started again; says what was lost, and ends those that live."""
        first = self._first_failed
        if first is None or self._stopped_at_once or self._received_at or self._received:
            return False
        self._read_reports()
        codes = [each.poll() for each in self._ranks]
        told = [report.value for report in self._reports if report.kind == "cause"]
        if any(code in (EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_RESUMABLE) for code in [*codes, *told]):
            return False
        if not self._restarts.begin(first, self._ranks[first].returncode, self._failed_at):
            return False
        self.kill()
        self._read_reports()
        self._forget()
        return True

    def close(self) -> None:
        """End the processes that wait, and the pipe on which ranks report."""
        if self._spares is not None:
            self._spares.close()
        self._read_reports()
        self._is_closed = True
        os.close(self._report_pipe)
        os.close(self._report_fd)

    def kill(self) -> None:
        """Kill who still lives."""
        for each in self._ranks:
            each.kill()
        for each in self._ranks:
            each.wait()

    def conclude(self) -> int:
        """Say what the job ended of, if the last line of the ranks does not, and return its exit code."""
        codes = [each.returncode for each in self._ranks]
        command = f"the same command{WITHOUT_FRESH_START if self._fresh else ''}"
        goes_on = f"checkpoints saved so far are whole, {command} continues."
        if self._stopped_at_once:
            print(f"\n{PROG}: stopped at once; {goes_on}", file=sys.stderr)
            return EXIT_INTERRUPTED
        if EXIT_INTERRUPTED in codes or any(-code in self._received_at for code in codes):
            print(f"{PROG}: stopped before there was anything to save; {goes_on}", file=sys.stderr)
            return EXIT_INTERRUPTED
        if self._first_failed is not None:
            self._name_the_cause(self._first_failed)
        return _job_code(codes)

    def _pass_on(self, number: int, at: float) -> None:
        if at - self._received_at.setdefault(number, at) >= _ECHO_SECONDS:
            self._stopped_at_once = True
        else:
            self._signal(number)

    def _signal(self, number: int) -> None:
        for each in self._ranks:
            each.send_signal(number)

    def _look_for_failures(self) -> None:
        if self._first_failed is None:
            failed = [rank for rank, each in enumerate(self._ranks) if _has_failed(each.returncode)]
            if not failed:
                return
            # Of several that are found together, one that was killed is why the others end.
            self._first_failed = min(failed, key=lambda rank: self._ranks[rank].returncode)
            self._failed_at = time.monotonic()

    def _is_overdue(self) -> bool:
        """Whether ranks live too long after one has failed; asks them to end before."""
        if self._first_failed is None:
            return False
        since = time.monotonic() - self._failed_at
        if self._restarts.left and not self._received_at:
            # They cannot save without the lost one; a rank that has failed by itself says why.
            return since > (0 if self._ranks[self._first_failed].returncode < 0 else _FAILED_RESTART_SECONDS)
        if self._ranks[self._first_failed].returncode < 0:
            return since > _KILLED_SECONDS
        if since > _FAILED_SECONDS and not self._asked_to_end:
            self._asked_to_end = True
            self._signal(signal.SIGTERM)
        return since > _FAILED_SECONDS + _END_SECONDS

    def _look_for_another_run(self) -> None:
        """Refuse the output directory as a rank would, which may import torch for seconds before it looks."""
        from trainer_core import ConfigurationError

        now = time.monotonic()
        if self._owns_output_dir() or now - self._looked_at < _LEASE_LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            refuse_if_in_use(self._output_dir, {each.pid for each in self._ranks})
        except OSError:
            return  # The ranks look themselves, and say what is wrong.
        except ConfigurationError:
            # The other run may have come when these ranks were through with their work.
            self._read_reports()
            if not self._owns_output_dir():
                raise

    def _owns_output_dir(self) -> bool:
        return any(report.kind == "owns" for report in self._reports)

    def _read_reports(self) -> None:
        if self._is_closed:
            return
        received = b""
        with suppress(BlockingIOError):
            while part := os.read(self._report_pipe, 65536):
                received += part
        # Each line was written in one piece, so that the last one is whole too.
        for line in received.splitlines():
            report = _Report(**json.loads(line))
            if report.kind in ("step", "begins", "owns"):
                self._note_progress(report)
            if report.kind != "step":
                self._reports.append(report)

    def _note_progress(self, report: _Report) -> None:
        if report.kind == "owns":
            self._restarts.note_connected()
        elif report.kind == "step":
            self._restarts.note_step(report.value)
        else:
            self._restarts.note_begin(report.value, report.text)
            if self._spares is not None and self._restarts.left:
                self._spares.start(self._processes)  # Not before: the ranks need the cores to start.

    def _name_the_cause(self, first: int) -> None:
        self._read_reports()
        reports = [report for report in self._reports if report.kind in ("cause", "consequence")]
        causes = [report for report in reports if report.kind == "cause"]
        code = self._ranks[first].returncode
        if code < 0:
            print(f"{PROG}: error: rank {first} was ended by {signal.Signals(-code).name}.", file=sys.stderr)
        elif causes and (self._asked_to_end or reports[-1].kind == "consequence"):
            print(f"{PROG}: error: [rank {causes[0].rank}] {causes[0].text}", file=sys.stderr)
        elif not causes and reports:
            said = "See what it printed above."
            print(f"{PROG}: error: rank {first} ended with exit code {code}. {said}", file=sys.stderr)


def _has_failed(code: int | None) -> bool:
    return code not in (None, 0, EXIT_RESUMABLE)


def _job_code(codes: Sequence[int]) -> int:
    if len(set(codes)) == 1 and codes[0] >= 0:
        return codes[0]
    if EXIT_USER_ERROR in codes:
        return EXIT_USER_ERROR
    return EXIT_ABORTED
