"""One start of the run up to its fault, and what has to hold then."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .checkpoints import Checkpoints
from .disk import Disk
from .history import History
from .job import Job
from .layouts import Layout
from .plan import Episode
from .workload import Workload

_SLOWEST_START = 4.0
"""Seconds over which kills in the time before the first step are spread."""
_POLL_SECONDS = 0.001
_LATEST_SAVE = 12
"""Steps after which a save that was not seen is waited for no longer."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a start, for the log."""

    name: str
    trainer: str
    ranks: int
    resumed: str
    """Which checkpoint the start continued from."""
    fault: str
    struck: str
    """At which step, or in which save, the fault came."""
    exit_codes: str
    damaged: str
    """What was done to a checkpoint afterwards; empty: nothing."""
    seconds: float
    """From the start until no process was left."""
    ending_seconds: float
    """From the fault until then."""


class Run:
    """The run that all episodes are starts of.

    Args:
        work: What is trained on what.
        disk: Where its output directory is.
        starts: A directory for what the witnesses of each start write.
    """

    def __init__(self, work: Workload, disk: Disk, starts: Path) -> None:
        self.disk = disk
        self.output = disk.folder / "run"
        self.checkpoints = Checkpoints(self.output)
        self.history = History()
        self._work, self._starts = work, starts
        self._damages: list[str] = []
        """Those that are still to be done."""

    def suffer(self, plan: Episode) -> Result:
        """Start the run, let the fault come, and check how it ended.

        Raises:
            ValueError: If something did not hold.
            TimeoutError: If processes hang.
        """
        began = time.monotonic()
        good, damaged = self.checkpoints.good(), self.checkpoints.damaged()
        with self._start(f"{plan.number:02d}", plan.layout) as job:
            struck = _wait_for_moment(plan, job, self.checkpoints)
            struck_at = time.monotonic()
            plan.fault.strike(job, self.disk, plan.rank)
            job.wait()
        ended = time.monotonic()
        self.disk.free()
        self._check(job, good, damaged)
        plan.fault.check(job, plan.rank, plan.moment)
        return Result(
            name=str(plan.number),
            trainer=plan.layout.name,
            ranks=plan.layout.ranks,
            resumed=_went_on_from(job),
            fault=plan.fault.name.replace("one rank", f"rank {plan.rank}"),
            struck=struck,
            exit_codes=_exit_codes(job),
            damaged=self._damage(plan),
            seconds=ended - began,
            ending_seconds=ended - struck_at,
        )

    def finish(self, layout: Layout) -> Result:
        """Start the run once more, and let it come to its end.

        Raises:
            ValueError: If something did not hold.
            TimeoutError: If processes hang.
        """
        began = time.monotonic()
        good, damaged = self.checkpoints.good(), self.checkpoints.damaged()
        with self._start("end", layout) as job:
            job.wait()
        if job.exit_code != 0:
            raise ValueError(f"the last start ended with {job.exit_code}: {job.output(0)[-2000:]}")
        self._check(job, good, damaged)
        if left := self.checkpoints.leftovers():
            raise ValueError(f"temporary files are left: {left}")
        return Result(
            name="end",
            trainer=layout.name,
            ranks=layout.ranks,
            resumed=_went_on_from(job),
            fault="none",
            struck="",
            exit_codes=_exit_codes(job),
            damaged="",
            seconds=time.monotonic() - began,
            ending_seconds=0.0,
        )

    def _start(self, name: str, layout: Layout) -> Job:
        words = self._work.words(self.output, layout)
        return Job(self._starts / name, words, layout.ranks, self._starts / "bytecode")

    def _check(self, job: Job, good: list[int], damaged: list[int]) -> None:
        """Compare a start with the checkpoints that there were before it, and add what it did."""
        if "forcefully exiting" in job.launcher_output():
            raise ValueError(f"a rank hung, so that torchrun killed it: {job.folder}")
        for rank in range(job.ranks):
            if "Traceback" in (told := job.output(rank)):
                raise ValueError(f"rank {rank} printed a traceback: {told[-2000:]}")
        resumed, newest = job.resumed_at(), max(good, default=0)
        if resumed not in (None, newest):
            raise ValueError(f"continued from step {resumed}; the newest good checkpoint is of step {newest}")
        for step in damaged:
            told = rf"^passing over checkpoint-{step}: .*(damaged|manifest)"
            if resumed is not None and step > newest and not re.search(told, job.output(0), re.MULTILINE):
                raise ValueError(f"nothing was said about the damaged checkpoint-{step}")
        self.history.add(job)

    def _damage(self, plan: Episode) -> str:
        """Do what is due to the newest checkpoint, if there is another good one to continue from."""
        self._damages += [plan.damage] if plan.damage else []
        if not self._damages or len(self.checkpoints.good()) < 2:
            return ""
        return self.checkpoints.damage_newest(self._damages.pop(0), random.Random(plan.seed))


def _wait_for_moment(plan: Episode, job: Job, checkpoints: Checkpoints) -> str:
    """Wait until the fault is to come, and say when that is.

    Raises:
        ValueError: If the job ended by itself before.
    """
    if plan.moment == "starting":
        _wait(job, lambda: len(job.pids()) == job.ranks)
        time.sleep(random.Random(plan.seed).uniform(0, _SLOWEST_START))
        return f"step {job.last_step()}" if job.steps_done() else "starting"
    _wait(job, lambda: job.steps_done() >= plan.after)
    if plan.moment == "saving":
        latest = job.steps_done() + _LATEST_SAVE
        _wait(job, lambda: bool(checkpoints.being_written()) or job.steps_done() >= latest)
        if writes := checkpoints.being_written():
            return f"saving {writes[0].split('-')[2]}"
    return f"step {job.last_step()}"


def _wait(job: Job, condition: Callable[[], bool]) -> None:
    while not condition():
        if job.exit_code is not None:
            raise ValueError(f"ended with {job.exit_code} before the fault: {job.output(0)[-2000:]}")
        job.check_patience()
        time.sleep(_POLL_SECONDS)


def _went_on_from(job: Job) -> str:
    step = job.resumed_at()
    return "" if step is None else f"checkpoint-{step}" if step else "nothing"


def _exit_codes(job: Job) -> str:
    """Those of the ranks, and behind them that of torchrun."""
    told = ", ".join("killed" if code is None else str(code) for code in job.exit_codes().values())
    return told if job.ranks == 1 else f"{told}; torchrun {job.exit_code}"
