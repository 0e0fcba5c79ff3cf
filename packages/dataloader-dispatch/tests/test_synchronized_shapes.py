"""Any shape of data over any number of ranks ends as documented, and never hangs."""

import json
import os
import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, note, settings
from hypothesis import strategies as st
from ports import free_port
from warm_start import WarmProcess, WarmStart

RANKS = 4
START_SECONDS = 120.0
LIMIT_SECONDS = 20.0
"""For one example."""
WORKER = Path(__file__).parent / "workers" / "synchronized_shapes.py"


@dataclass(frozen=True)
class Shape:
    """Batches per rank, their loaders' lengths (None for none), and which loader raises at which batch."""

    kind: str
    counts: tuple[int, ...]
    claims: tuple[int | None, ...]
    failing: int | None
    fails_at: int
    in_step: bool

    @property
    def is_refused(self) -> bool:
        """Lengths that differ are refused before the first batch."""
        return self.kind == "error" and None not in self.claims and len(set(self.claims)) > 1

    @property
    def is_padded(self) -> bool:
        return self.kind in ("pad", "evaluate")


@dataclass(frozen=True)
class Expected:
    """Iterations on every rank, and what they end with: nothing, DataError, or the failing rank's error."""

    batches: int
    end: str = "nothing"


def expected(shape: Shape) -> Expected:
    """The documented outcome, of callers with a collective in each step."""
    if len(shape.counts) == 1:
        return alone(shape)
    limit = end_of_data(shape)
    if shape.failing is not None and shape.fails_at <= limit.batches and not shape.is_refused:
        # A loader is asked for one batch more than all of them have.
        return Expected(shape.fails_at, "failure")
    if shape.kind == "evaluate" and limit == Expected(0):
        return Expected(0, "DataError")
    return limit


def alone(shape: Shape) -> Expected:
    if shape.failing is not None:
        return Expected(shape.fails_at, "failure")
    is_empty = shape.kind == "evaluate" and shape.counts == (0,)
    return Expected(shape.counts[0], "DataError" if is_empty else "nothing")


def end_of_data(shape: Shape) -> Expected:
    least, most = min(shape.counts), max(shape.counts)
    if shape.is_refused:
        return Expected(0, "DataError")
    if shape.is_padded:
        return Expected(most)
    return Expected(least, "DataError" if shape.kind == "error" and least < most else "nothing")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    world = draw(st.sampled_from([4, 3, 2, 1]))
    counts = draw(st.tuples(*[st.integers(0, 5)] * world))
    failing = draw(st.none() | st.sampled_from([rank for rank in range(world) if counts[rank]] or [None]))
    fails_at = 0 if failing is None else draw(st.integers(0, counts[failing] - 1))
    lengths = draw(st.sampled_from(["right", "none", "some"] + ["wrong"] * (failing is None)))
    claims = [draw(length_of(count, lengths)) for count in counts]
    kind = draw(st.sampled_from(["stop", "pad", "error", "evaluate"]))
    return Shape(kind, counts, tuple(claims), failing, fails_at, draw(st.booleans()))


def length_of(count: int, lengths: str) -> st.SearchStrategy[int | None]:
    right: st.SearchStrategy[int | None] = st.just(count)
    wrong = st.integers(max(0, count - 1), count + 2)
    return {"right": right, "none": st.none(), "some": right | st.none(), "wrong": wrong}[lengths]


class Job:
    """Ranks that wait for orders."""

    def __init__(self, folder: Path, warm: WarmStart) -> None:
        self.logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]
        self.orders = [folder / f"orders-{rank}" for rank in range(RANKS)]
        self.answered = [folder / f"answers-{rank}" for rank in range(RANKS)]
        for pipe in (*self.orders, *self.answered):
            os.mkfifo(pipe)
        port = str(free_port())
        self.ranks = [self._start(warm, rank, port) for rank in range(RANKS)]
        self.answers: list[queue.Queue[str]] = [queue.Queue() for _ in self.ranks]
        for pipe in zip(self.answered, self.answers, strict=True):
            threading.Thread(target=self._listen, args=pipe, daemon=True).start()
        # For reading too, so that opening it does not wait for a rank that has died.
        self.pipes = [os.fdopen(os.open(orders, os.O_RDWR), "w") for orders in self.orders]
        self.hang = ""
        for answers in self.answers:
            assert answers.get(timeout=START_SECONDS) == "ready\n"

    def run(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank answers; fails when one does not within the time limit."""
        if self.hang:
            pytest.fail(self.hang)  # the example is run again, for the report
        for pipe in self.pipes:
            print(json.dumps(order), file=pipe, flush=True)
        answers = []
        for rank, answered in enumerate(self.answers):
            try:
                answers.append(json.loads(answered.get(timeout=LIMIT_SECONDS)))
            except queue.Empty:
                self.hang = f"rank {rank} hangs: {order}\n{self.stacks()}"
                pytest.fail(self.hang)
        return answers

    def stacks(self) -> str:
        """End the job and tell where each rank was."""
        for process in self.ranks:
            process.send_signal(signal.SIGABRT)
            process.wait(60)
        return "\n".join(file.read_text() for file in self.logs)

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait(60)
        for pipe in self.pipes:
            pipe.close()

    def _start(self, warm: WarmStart, rank: int, port: str) -> WarmProcess:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(WORKER.parent),
        }
        words = [str(WORKER), str(self.orders[rank]), str(self.answered[rank])]
        return warm.start(words, {**os.environ, **variables}, Path(os.devnull), self.logs[rank])

    @staticmethod
    def _listen(answered: Path, answers: queue.Queue[str]) -> None:
        with answered.open() as lines:
            for line in lines:
                answers.put(line)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, warm: WarmStart) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("job"), warm)
    yield job
    job.kill()


@given(shape=shapes())
@settings(
    max_examples=100 if os.environ.get("FULL_TESTS") else 40,
    deadline=None,
    database=None,
    # A job that hung has been killed, so there is nothing to shrink the example with.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_shape_ends_as_documented(job: Job, shape: Shape) -> None:
    world, end = len(shape.counts), expected(shape)
    answers = job.run({**asdict(shape), "world": world, "is_error": end.end != "nothing"})[:world]
    event(f"{end.end}, world {world}")
    note(f"{end} {answers}")
    assert [error_of(answer) for answer in answers] == errors_of(shape, end)
    if end.end == "failure":
        for answer in answers:
            assert f"document {shape.fails_at} is bad" in answer["error"][1]
    if end.end != "nothing" and not shape.in_step:
        return  # nothing holds these callers together until they hear of the trouble
    for count, answer in zip(shape.counts, answers, strict=True):
        real = min(count, end.batches)
        assert answer["numbers"] == list(range(real))
        assert answer["dummies"] == end.batches - real


def error_of(answer: dict[str, Any]) -> str | None:
    return answer["error"] and answer["error"][0]


def errors_of(shape: Shape, end: Expected) -> list[str | None]:
    if end.end == "failure":
        return ["Failure" if r == shape.failing else "RankFailedError" for r in range(len(shape.counts))]
    return ["DataError" if end.end == "DataError" else None] * len(shape.counts)
