"""Kill the launcher of a job, or a rank, at random moments, and count who is left of the job after 2 seconds.

    python tests/resilience/kills.py --times 20 --seed 0 --output DIR

The job is `llama-pretrain train --mesh dp=2`. Each of its processes has a mark in its environment, which
children inherit, so that none is overlooked. The launcher and a rank in start-up are struck from the moment
that there is one until training has begun; a rank in training some time after its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:
    sys.path.append(str(Path(__file__).parents[1]))

from resilience.layouts import SINGLE
from resilience.workload import Workload

TARGETS = ("launcher", "rank", "rank in start-up")
PROMISED = 2.0
"""Seconds after which nothing of a job may be left."""
PATIENCE = 240.0
_MARK = "RESILIENCE_JOB"
_RANKS = 2


@dataclass(frozen=True)
class Kill:
    """What was killed, and who was there before and after."""

    target: str
    after: float
    """Seconds after the start of the job, or for a rank after the first step."""
    killed: int
    before: list[int]
    """Process ids of the job just before."""
    left: list[int]
    """Those that lived 2 seconds later."""
    seconds: float
    """Until nobody was left; the promised seconds if somebody was."""


class MeshJob:
    """A job of `train --mesh`, of which every process can be found."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self._log = folder / "run" / "trainer_logs.json"
        words = work.words(folder / "run", SINGLE)
        at = words.index("--trainer")
        words[at : at + 2] = ["--mesh", f"dp={_RANKS}"]
        folder.mkdir(parents=True)
        # Where bytecode is not kept, each process would compile all of torch anew.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        variables.setdefault("PYTHONPYCACHEPREFIX", str(folder.parent / "bytecode"))
        variables |= {"OMP_NUM_THREADS": "1", _MARK: self._mark}
        with (folder / "output").open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "llama_pretrain", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
            )

    def pids(self) -> list[int]:
        """All processes of the job that run; what is left of one that ended is not counted."""
        return [pid for pid, _ in self._members()]

    def rank(self, number: int) -> int | None:
        """The process of a rank, also while it starts."""
        wanted = b"RANK=%d" % number
        return next((pid for pid, variables in self._members() if wanted in variables), None)

    def has_trained(self) -> bool:
        """Whether the first step is done."""
        return self._log.is_file() and '"loss"' in self._log.read_text(encoding="utf-8")

    def _members(self) -> Iterator[tuple[int, list[bytes]]]:
        self.launcher.poll()
        mark = f"{_MARK}={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                variables = path.read_bytes().split(b"\0")  # empty for one that has ended
                if mark in variables:
                    yield int(path.parent.name), variables


@contextmanager
def mesh_job(work: Workload, folder: Path) -> Iterator[MeshJob]:
    """A job of which nothing is left behind."""
    job = MeshJob(work, folder)
    try:
        yield job
    finally:
        for pid in job.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.launcher.wait()


def kill(
    target: str,
    work: Workload,
    folder: Path,
    chance: random.Random,
    start_seconds: float,
    within: float = PROMISED,
) -> Kill:
    """Start a job, kill a part of it, and look for the rest.

    Args:
        target: One of `TARGETS`.
        work: What the job trains.
        folder: A new directory.
        chance: Chooses the moment, and the rank.
        start_seconds: How long a start takes.
        within: Seconds after which nobody may be left.

    Raises:
        TimeoutError: The job did not come to the moment.
    """
    with mesh_job(work, folder) as job:
        began = time.monotonic()
        number = chance.randrange(_RANKS)
        if target == "launcher":
            moment = chance.uniform(0.0, 1.2 * start_seconds)
        else:
            while job.rank(number) is None or (target == "rank" and not job.has_trained()):
                if time.monotonic() - began > PATIENCE or job.launcher.poll() is not None:
                    raise TimeoutError(f"{folder} did not come to the moment: {job.launcher.poll()}")
                time.sleep(0.005)
            moment = chance.uniform(0.0, 1.0 if target == "rank" else 0.9 * start_seconds)
        time.sleep(moment)
        struck_after = time.monotonic() - began
        victim = job.launcher.pid if target == "launcher" else job.rank(number)
        before = job.pids()
        if victim is None:
            raise TimeoutError(f"{folder} was over before the moment")
        os.kill(victim, signal.SIGKILL)
        struck = time.monotonic()
        while (left := job.pids()) and time.monotonic() - struck < within:
            time.sleep(0.01)
        return Kill(target, struck_after, victim, before, left, time.monotonic() - struck)


def start_seconds_of(work: Workload, folder: Path) -> float:
    """How long a job takes until its first step."""
    with mesh_job(work, folder) as job:
        began = time.monotonic()
        while not job.has_trained():
            if time.monotonic() - began > PATIENCE or job.launcher.poll() is not None:
                raise TimeoutError(f"{folder} does not train: {(folder / 'output').read_text()[-2000:]}")
            time.sleep(0.01)
        return time.monotonic() - began


def main() -> int:
    """Run the command line; exit code 1 if anybody was left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20, help="kills of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    options = parser.parse_args()
    folder, chance = options.output.absolute(), random.Random(options.seed)
    work = Workload.write(folder / "work", steps=100_000)
    start_seconds_of(work, folder / "first")  # compiles what is imported
    start_seconds = start_seconds_of(work, folder / "undisturbed")
    print(f"the first step is done {start_seconds:.1f} s after the start")
    kills = []
    for number in range(options.times):
        for target in TARGETS:
            name = f"{target.replace(' ', '-')}-{number}"
            kills.append(kill(target, work, folder / name, chance, start_seconds))
            one = kills[-1]
            found = f"killed {one.killed} of {one.before} after {one.after:.2f} s"
            print(f"{target:<17} {found}: {one.left or 'nobody'} left {one.seconds:.2f} s later", flush=True)
    for target in TARGETS:
        of_kind = [one for one in kills if one.target == target]
        seconds = max(one.seconds for one in of_kind)
        left = sum(bool(one.left) for one in of_kind)
        print(f"{target}: {len(of_kind)} kills, {left} left somebody, the slowest took {seconds:.2f} s")
    (folder / "kills.json").write_text(json.dumps([asdict(one) for one in kills], indent=1) + "\n")
    return 1 if any(one.left for one in kills) else 0


if __name__ == "__main__":
    sys.exit(main())
