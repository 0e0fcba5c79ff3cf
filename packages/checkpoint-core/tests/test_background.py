"""Actions beside the main thread: one at a time, none lost, whatever ends the process."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

from checkpoint_core import background, files
from checkpoint_core.background import BackgroundWorker
from checkpoint_core.errors import CheckpointError

SCENARIOS = Path(__file__).parent / "workers" / "background_scenarios.py"
COMPLETE = [str(line) for line in range(20)]
TERM = signal.SIGTERM


class Ended(NamedTuple):
    code: int
    lines: list[str]
    notes: list[str]
    stderr: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    directory = tmp_path_factory.mktemp("background")
    done = subprocess.run(
        [sys.executable, str(SCENARIOS), str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outcomes = {}
    for name, code in json.loads((directory / "codes.json").read_text()).items():
        notes = directory / f"{name}.notes"
        outcomes[name] = Ended(
            code,
            (directory / f"{name}.out").read_text().splitlines(),
            notes.read_text().splitlines() if notes.exists() else [],
            (directory / f"{name}.err").read_text(),
        )
    return outcomes


@pytest.mark.parametrize(
    ("name", "code", "notes"),
    [
        ("exits", 3, []),
        ("raises", 1, []),
        ("fails_at_exit", 0, []),
        ("fails_before_exit", 0, []),
        ("term_by_default", -TERM, []),
        ("term_in_wait", -TERM, []),
        ("term_in_start", -TERM, []),
        ("term_at_exit", -TERM, []),
        ("term_and_failure", -TERM, []),
        # Once, though the signal came twice, and not before the action had ended.
        ("term_to_handler", 0, ["handled 20", "continued 20"]),
        ("term_to_exit", 7, ["handled 20"]),
        ("term_while_holding_a_lock", -TERM, ["had the lock 20"]),
        ("group_returns_0", 0, ["sum 2000 20"]),
        ("group_returns_1", 0, ["sum 2000 20"]),
        ("group_term_0", -TERM, ["sum 2000 20"]),
        ("group_term_1", -TERM, ["sum 2000 20"]),
    ],
)
def test_the_action_is_finished_first(
    ended: dict[str, Ended], name: str, code: int, notes: list[str]
) -> None:
    outcome = ended[name]
    assert (outcome.code, outcome.lines, outcome.notes) == (code, COMPLETE, notes), outcome.stderr


def test_sigterm_does_not_wait_when_nothing_runs(ended: dict[str, Ended]) -> None:
    assert ended["term_when_idle"].code == -TERM
    assert 0 < len(ended["term_when_idle"].lines) < len(COMPLETE)


@pytest.mark.parametrize("name", ["fails_at_exit", "fails_before_exit", "term_and_failure", "forked"])
def test_a_failure_is_logged_when_it_happens(ended: dict[str, Ended], name: str) -> None:
    text = ended[name].stderr
    assert "saving checkpoint-10 failed in the background: no space left to write" in text
    assert text.count("failed in the background: no space left") == 1


def test_a_failure_that_nobody_raised_is_logged_at_exit(ended: dict[str, Ended]) -> None:
    for name in ("fails_at_exit", "fails_before_exit"):
        text = ended[name].stderr
        assert "saving checkpoint-10 had failed in the background, and no later call has raised it" in text
        # With its traceback.
        assert "in fail" in text
    assert "no later call" not in ended["forked"].stderr
    assert ended["exits"].stderr == ""


def test_sigterm_says_what_it_waited_for(ended: dict[str, Ended]) -> None:
    assert "SIGTERM arrived while saving checkpoint-10" in ended["term_by_default"].stderr


def test_ctrl_c_ends_the_wait_and_not_the_action(ended: dict[str, Ended]) -> None:
    outcome = ended["interrupted_at_the_end"]
    assert (outcome.code, outcome.lines) == (-signal.SIGINT, COMPLETE), outcome.stderr
    (note,) = outcome.notes
    assert note.startswith("pending True ")
    assert int(note.split()[-1]) < len(COMPLETE)
    assert "KeyboardInterrupt" in outcome.stderr


def test_a_forked_child_has_no_part_in_it(ended: dict[str, Ended]) -> None:
    outcome = ended["forked"]
    assert (outcome.code, outcome.lines) == (0, COMPLETE), outcome.stderr
    child, raised = outcome.notes
    assert child.startswith(f"child {-TERM} ")
    # The child did not wait for the action of its parent.
    assert int(child.split()[-1]) < len(COMPLETE)
    assert raised == "raised 28 20"


@pytest.fixture
def worker() -> Iterator[BackgroundWorker]:
    before = signal.getsignal(TERM)
    worker = BackgroundWorker()
    yield worker
    worker.close()
    signal.signal(TERM, before)


class Failing:
    """An action that waits for its cue and then fails."""

    def __init__(self) -> None:
        self.cue = threading.Event()
        self.error = RuntimeError("the disk is on fire")

    def __call__(self) -> None:
        assert self.cue.wait(10)
        raise self.error


def test_a_failure_is_raised_by_the_next_call_and_once(worker: BackgroundWorker) -> None:
    action = Failing()
    worker.start("saving checkpoint-1", action)
    assert worker.pending
    worker.check()
    action.cue.set()
    with pytest.raises(RuntimeError, match=r"^the disk is on fire") as caught:
        worker.wait()
    assert caught.value is action.error
    assert "saving checkpoint-1" in action.error.__notes__[0]
    assert not worker.pending
    worker.wait()
    worker.check()

    worker.start("saving checkpoint-2", action)
    deadline = time.monotonic() + 10
    while worker.pending and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(RuntimeError) as caught:
        worker.check()
    assert caught.value is action.error
    worker.check()


def test_start_raises_the_failure_before_it_starts_anything(worker: BackgroundWorker) -> None:
    action = Failing()
    action.cue.set()
    ran: list[int] = []
    worker.start("saving checkpoint-1", action)
    with pytest.raises(RuntimeError, match=r"^the disk is on fire"):
        worker.start("saving checkpoint-2", lambda: ran.append(2))
    assert not worker.pending
    worker.start("saving checkpoint-3", lambda: ran.append(3))
    worker.wait()
    assert ran == [3]


def test_two_never_overlap(worker: BackgroundWorker) -> None:
    running: list[int] = []
    most: list[int] = []

    def action() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.002)
        running.pop()

    for _ in range(30):
        worker.start("saving", action)
    worker.wait()
    assert most == [1] * 30
    assert threading.active_count() == 1 or "saving" not in {thread.name for thread in threading.enumerate()}


def test_an_action_lets_go_of_what_it_held(worker: BackgroundWorker) -> None:
    class Memory:
        pass

    memory = Memory()
    worker.start("saving", lambda held=memory: None)  # type: ignore[misc]
    while worker.pending:
        time.sleep(0.001)
    del memory
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Memory]


def test_close_restores_the_handler_and_ends_the_worker(worker: BackgroundWorker) -> None:
    before = signal.getsignal(TERM)
    action = Failing()
    action.cue.set()
    worker.start("saving", action)
    assert signal.getsignal(TERM) != before
    with pytest.raises(RuntimeError, match=r"^the disk is on fire"):
        worker.close()
    assert signal.getsignal(TERM) == before
    worker.close()
    with pytest.raises(CheckpointError, match=r"saving checkpoint-2: nothing can be started after close"):
        worker.start("saving checkpoint-2", lambda: None)
    assert signal.getsignal(TERM) == before


def test_close_leaves_a_handler_of_somebody_else(worker: BackgroundWorker) -> None:
    seen: list[str] = []
    signal.signal(TERM, lambda *_: seen.append("before"))
    worker.start("saving", lambda: None)
    ours = signal.getsignal(TERM)

    def theirs(number: int, frame: FrameType | None) -> None:
        seen.append("theirs")
        assert callable(ours)
        ours(number, frame)

    signal.signal(TERM, theirs)
    worker.close()
    assert signal.getsignal(TERM) is theirs
    # They may still call ours, which has nothing left to wait for.
    signal.raise_signal(TERM)
    assert seen == ["theirs", "before"]


def test_an_ignored_sigterm_stays_ignored(worker: BackgroundWorker) -> None:
    signal.signal(TERM, signal.SIG_IGN)
    cue = threading.Event()
    worker.start("saving", lambda: (cue.wait(10), None)[1])
    signal.raise_signal(TERM)
    assert signal.getsignal(TERM) == signal.SIG_IGN
    cue.set()
    worker.close()
    assert signal.getsignal(TERM) == signal.SIG_IGN


def test_a_signal_that_came_twice_is_handled_once(worker: BackgroundWorker) -> None:
    seen: list[bool] = []
    signal.signal(TERM, lambda *_: seen.append(cue.is_set()))
    cue = threading.Event()
    worker.start("saving", lambda: (cue.wait(10), None)[1])
    signal.raise_signal(TERM)
    signal.raise_signal(TERM)
    assert seen == []
    cue.set()
    for _ in range(3):
        worker.start("saving", lambda: None)
    worker.wait()
    assert seen == [True]
    signal.raise_signal(TERM)
    assert seen == [True, True]


def test_two_workers_both_hold_the_signal(worker: BackgroundWorker) -> None:
    seen: list[str] = []
    signal.signal(TERM, lambda *_: seen.append(" ".join(done)))
    done: list[str] = []
    cues = [threading.Event(), threading.Event()]
    other = BackgroundWorker()
    worker.start("first", lambda: (cues[0].wait(10), done.append("first"))[1])
    other.start("second", lambda: (cues[1].wait(10), done.append("second"))[1])
    signal.raise_signal(TERM)
    cues[1].set()
    other.wait()
    assert seen == []
    cues[0].set()
    worker.wait()
    assert seen == ["second first"]
    other.close()


def test_start_from_another_thread_says_that_sigterm_will_not_wait(
    worker: BackgroundWorker, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(TERM)
    ran: list[int] = []

    def run() -> None:
        worker.start("saving checkpoint-1", lambda: ran.append(1))
        worker.start("saving checkpoint-2", lambda: ran.append(2))
        worker.wait()

    thread = threading.Thread(target=run, name="loop")
    thread.start()
    thread.join()
    assert ran == [1, 2]
    assert signal.getsignal(TERM) == before
    assert [record.getMessage() for record in caplog.records] == [
        "SIGTERM will not wait for saving checkpoint-1: this was started from thread 'loop', and only the "
        "main thread may hold it"
    ]
    worker.start("saving checkpoint-3", lambda: ran.append(3))
    assert signal.getsignal(TERM) != before


def test_a_worker_that_nobody_kept_finishes_and_reports(
    worker: BackgroundWorker, caplog: pytest.LogCaptureFixture
) -> None:
    action = Failing()
    dropped = BackgroundWorker()
    dropped.start("saving checkpoint-1", action)
    reference = weakref.ref(dropped)
    del dropped
    gc.collect()
    action.cue.set()
    deadline = time.monotonic() + 10
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.001)
    assert "failed in the background: RuntimeError: the disk is on fire. The next call" in caplog.text
    # It lives on with its failure, for the report at exit.
    kept = reference()
    assert kept is not None
    with pytest.raises(RuntimeError):
        kept.close()


def test_no_room_for_a_thread(worker: BackgroundWorker) -> None:
    ran: list[int] = []
    before = threading.stack_size(1 << 46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            worker.start("saving checkpoint-1", lambda: ran.append(1))
    finally:
        threading.stack_size(before)
    assert not worker.pending
    worker.start("saving checkpoint-2", lambda: ran.append(2))
    worker.wait()
    assert ran == [2]


def test_sigterm_at_any_instant_is_handled_once_and_never_during_an_action(worker: BackgroundWorker) -> None:
    handled: list[bool] = []
    running = False
    signal.signal(TERM, lambda *_: handled.append(running))

    def action() -> None:
        nonlocal running
        running = True
        time.sleep(random.Random(len(handled)).random() * 2e-4)
        running = False

    instants = random.Random(3)
    main = threading.main_thread().ident
    assert main is not None
    for count in range(300):
        delay = instants.random() * 5e-4
        sender = threading.Timer(delay, signal.pthread_kill, (main, TERM))
        sender.start()
        while sender.is_alive():
            worker.start("saving", action)
        worker.wait()
        sender.join()
        assert len(handled) == count + 1
    assert not any(handled)


class Interrupt(BaseException):
    """What Ctrl-C raises, under a name of its own."""


def test_an_interrupt_at_any_instant_leaves_a_worker_that_works(worker: BackgroundWorker) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        # Not inside Thread.start, which has gaps of its own, nor in a destructor, where errors are ignored;
        # and not in this function, which may have been called there.
        nonlocal armed
        code = None if frame is None else frame.f_code
        elsewhere = code is None or code is interrupt.__code__
        if armed and not elsewhere and code.co_filename in (__file__, background.__file__, files.__file__):
            # An alarm that is on its way already comes all the same.
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Interrupt

    armed = False
    started = finished = interrupts = 0

    def action() -> None:
        nonlocal started, finished
        # Another one in between would be seen here.
        assert started == finished
        started += 1
        time.sleep(1e-4)
        finished += 1

    instants = random.Random(5)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(150):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + instants.random() * 1e-3, 1e-4)
                while True:
                    worker.start("saving", action)
            except Interrupt:
                interrupts += 1
            worker.wait()
            assert not worker.pending
            assert started == finished
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts == 150
    worker.start("saving", action)
    worker.wait()
    assert started == finished >= 150
