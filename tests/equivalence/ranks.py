"""Processes that wait for rows, and train them together.

torch takes seconds to start, so the processes are forked from one that has imported it, and stay from one row
to the next. Each row opens a process group of its own among as many of them as it has ranks. When something
goes wrong all are ended, and the next row starts others.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from ports import free_port

from .case import Case
from .rank import Failure, Job, Part, serve, train_alone
from .reference import Point

PATIENCE = 300.0
"""Seconds that a row may take, compilation included."""
GRACE = 30.0
"""Seconds that the other ranks have to end once one has failed, and to say why."""

PRELOADED = [
    *("trainer_ddp", "trainer_fsdp2", "trainer_pipeline"),
    *("torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"),
]
"""What all ranks import; none of these starts a thread, which a fork would lose."""


def train_on_ranks(
    case: Case,
    directory: Path,
    world_size: int,
    part: Part,
    environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
    home: Callable[[int], Path] | None = None,
) -> list[Point]:
    """Train a row on several ranks; one rank needs no process and is this one.

    Args:
        case: The row.
        directory: Output directory, unless the row names another one.
        world_size: Number of ranks.
        part: Which part of the run.
        environ: Variables that are set on one rank alone, by its number; not for one rank.
        home: Where a rank runs, by its number, so that a relative ``output_dir`` is its own.

    Returns:
        What every rank logged.

    Raises:
        RuntimeError: A rank failed, did not answer in time, or logged another curve than the others.
    """
    if world_size == 1:
        return train_alone(case, directory, part)
    port = free_port()
    jobs = [
        Job(case, directory, part, rank, world_size, port, environ(rank), home and home(rank))
        for rank in range(world_size)
    ]
    curves = _POOL.run(jobs)
    if any(repr(curve) != repr(curves[0]) for curve in curves):
        raise RuntimeError(f"{case.name}: the ranks logged different curves: {curves}")
    return curves[0]


class Pool:
    """The processes; none until a row needs them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(self, jobs: list[Job]) -> list[list[Point]]:
        """Give one job to each process, and collect the answers."""
        while len(self._workers) < len(jobs):
            self._workers.append(_Worker(len(self._workers)))
        workers = self._workers[: len(jobs)]
        for worker, job in zip(workers, jobs, strict=True):
            worker.give(job)
        answers = _collect(workers)
        if trouble := [
            _report(rank, worker, answer)
            for rank, (worker, answer) in enumerate(zip(workers, answers, strict=True))
            if not isinstance(answer, list)
        ]:
            self.end(kill=True)
            raise RuntimeError("\n".join([f"{jobs[0].case.name}: not every rank trained it", *trouble]))
        return answers  # type: ignore[return-value]  # lists are all that is left

    def end(self, *, kill: bool = False) -> None:
        """End all processes, which are given a moment for it unless they are to be killed."""
        for worker in self._workers:
            worker.dismiss(kill=kill)
        while self._workers:
            self._workers.pop().end()


class _Worker:
    """A process, and what it writes."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.connection, theirs = context.Pipe()
        descriptor, name = tempfile.mkstemp(prefix=f"rank-{number}-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)
        self.process: BaseProcess = context.Process(target=serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()
        self._written = 0

    def give(self, job: Job) -> None:
        self._written = self.log.stat().st_size
        self.connection.send(job)

    def answer(self) -> object:
        """A curve, a `Failure`, or None if it has died."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            return None

    def output(self) -> str:
        """What it has written since the last job."""
        return self.log.read_bytes()[self._written :].decode(errors="replace")

    def ended(self) -> int | None:
        """Its exit code, if it has died; it may take a moment from its last sign to its end."""
        self.process.join(0.5)
        return self.process.exitcode

    def dismiss(self, *, kill: bool) -> None:
        self.connection.close()
        if kill:
            self.process.kill()

    def end(self) -> None:
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)


def _collect(workers: list[_Worker]) -> list[object]:
    """The answers; None from a process that has died, or has not answered in time."""
    answers: dict[_Worker, object] = {}
    deadline = time.monotonic() + PATIENCE
    while len(answers) < len(workers):
        waiting = {worker.connection: worker for worker in workers if worker not in answers}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for worker in [waiting[one] for one in ready if isinstance(one, Connection)]:
            answers[worker] = worker.answer()
            if not isinstance(answers[worker], list):
                deadline = min(deadline, time.monotonic() + GRACE)
    return [answers.get(worker) for worker in workers]


def _report(rank: int, worker: _Worker, answer: object) -> str:
    if isinstance(answer, Failure):
        what = answer.traceback
    elif worker.ended() is None:
        what = f"did not answer; it is given {PATIENCE:.0f} s, and {GRACE:.0f} s once another has failed"
    else:
        what = f"ended with exit code {worker.ended()}"
    return f"--- rank {rank}: {what}\n{worker.output()}"


_POOL = Pool()
atexit.register(_POOL.end)
