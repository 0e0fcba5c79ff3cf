"""Starts jobs, kills them at random instants, and compares what they reported with what is on the disk."""

import json
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kill_audit import Directory, Outcome, Save, phase_of
from kill_job import MODES, REFUSED_EXIT, SAVE_TOTAL_LIMIT, Life, run_rank

from checkpoint_core.directory import DELETED, REPLACED

START_SECONDS = 60.0
GRACE_SECONDS = 30.0
"""What a rank may need beyond its timeout to end."""
LONGEST_DELAY = 0.5
ONE_ONLY_EVERY = 6
"""Of a job of two ranks, every so many kills hit one rank only."""
AIMS = (REPLACED, DELETED)
"""Traces of moments that are too short to be hit often by chance; some kills wait for one of these."""

Event = dict[str, object]


class Running:
    """The processes of one life, and what they report."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.events: list[Event] = []
        self.closed = False
        self._rest = b""
        self._reader, writer = os.pipe()
        self.pids: list[int] = []
        for rank in range(life.mode.ranks):
            pid = os.fork()
            if pid == 0:
                os.close(self._reader)
                run_rank(life, rank, writer)
            self.pids.append(pid)
        os.close(writer)

    def read(self, seconds: float) -> None:
        """Take in what is reported within some time; returns at the first report, or when all have ended."""
        if not select.select([self._reader], [], [], max(seconds, 0.0))[0]:
            return
        chunk = os.read(self._reader, 65536)
        self.closed = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self.events += [{**json.loads(line), "seen": time.monotonic()} for line in lines]

    def wait_for(self, kind: str, seconds: float) -> float:
        """Read until every rank has reported something.

        Returns:
            When the last one did.
        """
        deadline = time.monotonic() + seconds
        while len(found := self.of(kind)) < self.life.mode.ranks:
            if self.closed or time.monotonic() > deadline:
                raise RuntimeError(f"the job did not get to {kind!r}: {self.events}")
            self.read(deadline - time.monotonic())
        return max(float(str(event["seen"])) for event in found)

    def of(self, kind: str) -> list[Event]:
        """The first event of a kind of each rank."""
        first: dict[object, Event] = {}
        for event in self.events:
            if event["kind"] == kind:
                first.setdefault(event["rank"], event)
        return list(first.values())

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL, one right after the other; then wait until they are gone."""
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)
        for rank in ranks:
            _, status = os.waitpid(self.pids[rank], 0)
            if not os.WIFSIGNALED(status):
                raise RuntimeError(f"rank {rank} had ended by itself, status {status}: {self.events}")

    def drain(self, seconds: float) -> bool:
        """Read until all processes have ended; False when some live on."""
        deadline = time.monotonic() + seconds
        while not self.closed and time.monotonic() < deadline:
            self.read(deadline - time.monotonic())
        return self.closed

    def close(self) -> None:
        """End what still runs."""
        os.close(self._reader)
        for pid in self.pids:
            # Those that were waited for are not children any more, and their ids may be somebody else's.
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def outcome(self) -> Outcome:
        """What the reports mean."""
        loaded = self.of("loaded")[0]
        values, step = loaded["values"], loaded["step"]
        assert isinstance(values, list)
        assert step is None or isinstance(step, int)
        before = None if step is None else Save(int(values[0]), step)
        done: list[Save] = []
        begun: dict[object, Save] = {}
        for event in self.events:
            if event["kind"] in ("begun", "done"):
                save = Save(int(str(event["value"])), int(str(event["step"])))
                if event["kind"] == "begun":
                    begun[event["rank"]] = save
                elif save not in done:
                    done.append(save)
        committed = done[-1] if done else before
        last = min(begun.values(), key=lambda save: save.value) if len(begun) == len(self.pids) else None
        newest = max(begun.values(), key=lambda save: save.value, default=None)
        return Outcome(
            resumed=before,
            committed=committed,
            pending=last if last != committed else None,
            during_save=newest is not None and newest != committed,
            returned=done,
        )


def aim_at(directory: Path, prefix: str) -> None:
    """Wait for a new entry in a directory, as closely as one can from outside."""
    before = names_in(directory)
    deadline = time.monotonic() + LONGEST_DELAY
    while time.monotonic() < deadline:
        if any(name.startswith(prefix) for name in names_in(directory) - before):
            return


def names_in(directory: Path) -> set[str]:
    """Names of the entries; cheaper than paths, for a tight loop."""
    with os.scandir(directory) as entries:
        return {entry.name for entry in entries}


@dataclass
class Campaign:
    """All kills of one mode in one directory."""

    mode: str
    directory: Path
    timeout_seconds: float
    chance: random.Random
    kills: int = 0
    saves: int = 0
    failures: list[str] = field(default_factory=list)
    phases: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    longest_wait: float = 0.0

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)
        self._next_value = 1
        self._save_seconds = 0.05
        self._expected: set[int] = set()
        """What the next life may load; empty for nothing."""
        self._leftovers = False
        self._directories: list[Directory] = []

    def kill(self) -> None:
        """One life and its end.

        Raises:
            RuntimeError: The job does not get anywhere.
        """
        with self._life() as running:
            both = list(range(running.life.mode.ranks))
            one_only = len(both) > 1 and self.kills % ONE_ONLY_EVERY == ONE_ONLY_EVERY - 1
            killed = [self.chance.choice(both)] if one_only else self.chance.sample(both, len(both))
            self._wait_for_the_moment(running)
            running.kill(killed)
            at = time.monotonic()
            if one_only:
                self._await_survivor(running, killed[0], at)
            elif not running.drain(GRACE_SECONDS):
                raise RuntimeError("a killed job still holds its pipe")
            self.kills += 1
            self._examine(running)

    def finish(self) -> None:
        """One life that ends by itself behind its first save.

        Raises:
            RuntimeError: It does not get there.
        """
        with self._life(endless=False) as running:
            running.wait_for("tidy", START_SECONDS)
            if not running.drain(START_SECONDS):
                raise RuntimeError(f"the last job did not end: {running.events}")
            statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running.pids]
            if any(statuses):
                self._fail(f"the last job ended with {statuses}: {running.events}")
            self._examine(running)

    def summary(self) -> dict[str, object]:
        return {
            "kills": self.kills,
            "saves": self.saves,
            "failures": self.failures,
            "phases": dict(self.phases.most_common()),
            **dict(sorted(self.counts.items())),
            "longest_wait_of_a_survivor": round(self.longest_wait, 2),
        }

    @contextmanager
    def _life(self, *, endless: bool = True) -> Iterator[Running]:
        mode = MODES[self.mode]
        asynchronous = self.mode == "async" or (mode.ranks > 1 and self.chance.random() < 0.5)
        life = Life(mode, self.directory, asynchronous, self._next_value, self.timeout_seconds, endless)
        self.counts["asynchronous"] += asynchronous
        if not self._directories:
            writers = 1 if mode.nodes else mode.ranks
            self._directories = [Directory(path, writers) for path in life.output_dirs()]
        running = Running(life)
        try:
            running.wait_for("loaded", START_SECONDS)
            loaded = running.of("loaded")
            expected = [[float(value)] for value in self._expected or {0}]
            if any(
                event["values"] not in expected or event["values"] != loaded[0]["values"] for event in loaded
            ):
                self._fail(f"loaded is {loaded}, committed was {self._expected}")
            yield running
        finally:
            running.close()

    def _wait_for_the_moment(self, running: Running) -> None:
        """Spread the kills over three saves, the first one of the life or later ones."""
        start = time.monotonic()
        if self.chance.random() < 0.7:
            start = running.wait_for("loaded", 0.0)
            first = running.wait_for("done", START_SECONDS)
            self._save_seconds = first - start
        directory = self.chance.choice(running.life.output_dirs())
        if self.chance.random() < 0.25 and directory.is_dir():
            self.counts["aimed"] += 1
            aim_at(directory, f".{self.chance.choice(AIMS)}-")
            if self.chance.random() < 0.5:
                time.sleep(self.chance.uniform(0.0, 0.001))
        else:
            # Some lives are long enough for rotation to delete what they saved themselves.
            span = 12 if self.chance.random() < 0.1 else 3
            # On a slow disk one save takes longer than that, and its end must be hit, too.
            longest = max(LONGEST_DELAY, 1.5 * self._save_seconds)
            time.sleep(self.chance.uniform(0.0, min(span * self._save_seconds, longest)))

    def _await_survivor(self, running: Running, killed: int, at: float) -> None:
        """The rank that was not killed must end by itself, with an error that names the other."""
        survivor = 1 - killed
        self.counts["one_rank_only"] += 1
        if not running.drain(self.timeout_seconds + GRACE_SECONDS):
            self._fail(f"rank {survivor} hangs behind the end of rank {killed}: {running.events[-3:]}")
            running.kill([survivor])
            running.drain(GRACE_SECONDS)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(running.pids[survivor], 0)[1])
        refusals = [event for event in running.of("refused") if event["rank"] == survivor]
        message = str(refusals[0]["message"]) if refusals else ""
        if code != REFUSED_EXIT or f"rank {killed} (" not in message:
            self._fail(f"rank {survivor} ended with {code} and did not name rank {killed}: {message}")
        self.longest_wait = max(self.longest_wait, time.monotonic() - at)

    def _examine(self, running: Running) -> None:
        outcome = running.outcome()
        self.saves += len(outcome.returned)
        self._next_value = 1 + max([self._next_value, *(int(str(e.get("value", 0))) for e in running.events)])
        for event in running.of("crashed"):
            self._fail(f"rank {event['rank']} crashed: {event['message']}")
        self._check_tidy(running)
        paths = [directory.path for directory in self._directories]
        if running.life.endless:
            self._count_phases([phase_of(path, outcome, running.pids) for path in paths])
        self._leftovers = any(
            item.name.startswith(".") for path in paths if path.is_dir() for item in path.iterdir()
        )
        for directory in self._directories:
            for problem in directory.audit(outcome):
                self._fail(problem)
        self._expected = self._loadable(outcome)

    def _count_phases(self, phases: list[str]) -> None:
        ahead = ("after the rename", "rotation", "removal of the replaced one")
        apart = len({phase in ahead for phase in phases}) > 1
        self.phases["published on one node only" if apart else phases[0]] += 1

    def _check_tidy(self, running: Running) -> None:
        """The first save of a life leaves nothing hidden, and as many checkpoints as it may."""
        tidy = running.of("tidy")
        for event in tidy:
            kept = event["kept"]
            if event["hidden"] or not isinstance(kept, list) or len(kept) > SAVE_TOTAL_LIMIT + 1:
                self._fail(f"the first save of a life left {event}")
        self.counts["leftovers_cleaned"] += bool(tidy) and self._leftovers

    def _loadable(self, outcome: Outcome) -> set[int]:
        """What the next life may load: the newest save, which is the last committed or the pending one."""
        newest = {
            directory.values[max(directory.values)] for directory in self._directories if directory.values
        }
        if not newest <= outcome.allowed:
            self._fail(f"the newest checkpoints hold {newest}, of {outcome.allowed} allowed")
        # Nodes that were killed between their renames have different ones, and must come to one of the two.
        return newest if len(newest) < 2 else outcome.allowed

    def _fail(self, problem: str) -> None:
        self.failures.append(f"kill {self.kills}: {problem}")
