"""The faults that end a start of the run: what is done to it, and how its ranks have to end then."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .disk import Disk
from .job import Job

ABORTED, STOPPED = 1, 75
_ANY_TIME = ("starting", "step", "step", "saving", "saving")
_IN_TRAINING = ("step", "saving")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A way to disturb a run.

    The checks of how it ended take the job and the rank that was meant, and raise `ValueError`.
    """

    name: str
    strike: Callable[[Job, Disk, int], None]
    """Given the job, its disk and the rank that is meant."""
    check: Callable[[Job, int, str], None]
    """Given the job, the rank that is meant, and the moment."""
    moments: Sequence[str] = _IN_TRAINING
    least_ranks: int = 1


def _kill_one(job: Job, disk: Disk, rank: int) -> None:
    job.kill(rank)


def _kill_all(job: Job, disk: Disk, rank: int) -> None:
    job.kill_all()


def _stop(job: Job, disk: Disk, rank: int) -> None:
    job.terminate()


def _fill_disk(job: Job, disk: Disk, rank: int) -> None:
    disk.fill(job.pids().values())


def _stop_and_kill_one(job: Job, disk: Disk, rank: int) -> None:
    job.terminate()
    job.wait_for_output(rank, "SIGTERM")
    job.kill(rank)


def _others_say_who_is_lost(job: Job, rank: int, moment: str) -> None:
    """Everybody ends; who was in training by then says which rank is lost, and no success is reported."""
    codes = job.exit_codes()
    if job.exit_code == 0 or codes[rank] is not None:
        raise ValueError(f"rank {rank} was killed, and exit codes are {codes}, in all {job.exit_code}")
    for other in codes.keys() - {rank}:
        if codes[other] == ABORTED:
            _check_complaint(job, other, rf"rank {rank} ")
        elif codes[other] is not None or moment != "starting":
            raise ValueError(f"rank {other} ended with {codes[other]} though rank {rank} was killed")


def _nobody_is_left_to_tell(job: Job, rank: int, moment: str) -> None:
    told = [code for code in job.exit_codes().values() if code is not None]
    if told:
        raise ValueError(f"all were killed, and some told exit codes: {told}")


def _all_have_saved(job: Job, rank: int, moment: str) -> None:
    """Every rank exits with 75; torchrun has codes of its own for that, which tell of no success."""
    codes = set(job.exit_codes().values())
    if codes != {STOPPED} or (job.exit_code != STOPPED if job.ranks == 1 else job.exit_code == 0):
        raise ValueError(f"exit codes after SIGTERM are {codes}, in all {job.exit_code}")


def _some_have_no_space(job: Job, rank: int, moment: str) -> None:
    """Who could not write says so in the system's words, in one line; others say that a rank failed."""
    codes = job.exit_codes()
    if set(codes.values()) != {ABORTED}:
        raise ValueError(f"exit codes on a full disk are {codes}")
    no_space = "No space left on device|not enough space|File too large"
    if not any(re.search(no_space, job.output(rank)) for rank in codes):
        raise ValueError("no rank says that the disk is full")
    for each in codes:
        _check_complaint(job, each, f"{no_space}|rank ")


def _stopped_or_lost(job: Job, rank: int, moment: str) -> None:
    """Who is left has saved before the kill, or says who is lost."""
    codes = job.exit_codes()
    for other in codes.keys() - {rank}:
        if codes[other] == ABORTED:
            _check_complaint(job, other, rf"rank {rank} ")
        elif codes[other] != STOPPED:
            raise ValueError(f"rank {other} ended with {codes[other]} after SIGTERM and the kill of {rank}")


def _check_complaint(job: Job, rank: int, pattern: str) -> None:
    """Make sure that a rank ended with one line that says who it is and what is wrong."""
    lines = [line for line in job.output(rank).splitlines() if line.startswith("llama-pretrain: error: ")]
    who = rf"\[rank {rank}\] .*" if job.ranks > 1 else ".*"
    if len(lines) != 1 or not re.search(f"error: {who}({pattern})", lines[0]):
        raise ValueError(f"rank {rank} should say one line with {pattern!r}, and said: {lines}")


KILL_ONE = Fault(
    name="kill one rank",
    strike=_kill_one,
    check=_others_say_who_is_lost,
    moments=_ANY_TIME,
    least_ranks=2,
)
KILL_ALL = Fault(name="kill all", strike=_kill_all, check=_nobody_is_left_to_tell, moments=_ANY_TIME)
STOP = Fault(name="SIGTERM", strike=_stop, check=_all_have_saved)
FULL_DISK = Fault(name="disk full", strike=_fill_disk, check=_some_have_no_space)
STOP_AND_KILL = Fault(
    name="SIGTERM, kill one rank", strike=_stop_and_kill_one, check=_stopped_or_lost, least_ranks=2
)
FAULTS = (KILL_ONE, KILL_ALL, STOP, FULL_DISK, STOP_AND_KILL)
