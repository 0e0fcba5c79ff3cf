"""Real processes that end in every way while an action runs. Usage: background_scenarios.py DIRECTORY

Each scenario is a forked child of this process, so that torch is imported once; it ends as any interpreter
does. Its standard error goes to DIRECTORY/<name>.err, its action writes DIRECTORY/<name>.out, and the exit
codes of all go to DIRECTORY/codes.json (negative: the signal that ended it).
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from checkpoint_core.background import BackgroundWorker

LINES = 20
LINE_SECONDS = 0.02
TERM, INT = signal.SIGTERM, signal.SIGINT


class Scenario:
    """One child's files, and the action that it runs in the background."""

    def __init__(self, directory: Path, name: str, signals: tuple[int, ...]) -> None:
        self.signals = signals
        self.signalled = directory / f"{name}.signalled"
        self.out = directory / f"{name}.out"
        self.running = directory / f"{name}.running"
        self.notes = directory / f"{name}.notes"
        self.worker = BackgroundWorker()

    def write(self) -> None:
        """Take a while, and leave a file that tells whether it was finished."""
        with self.out.open("w") as file:
            for line in range(LINES):
                print(line, file=file, flush=True)
                self.running.touch()
                # The signals come in the middle of the action, however busy the machine is.
                while line == LINES // 2 and self.signals and not self.signalled.exists():
                    time.sleep(0.002)
                time.sleep(LINE_SECONDS)

    def fail(self) -> None:
        self.write()
        raise OSError(28, "No space left on device", str(self.out))

    def start(self, action: Callable[[], None] | None = None) -> None:
        self.worker.start("saving checkpoint-10", action or self.write)
        while not self.running.exists():
            time.sleep(0.005)

    def note(self, text: str) -> None:
        """Remember what was seen, with the number of lines that the action had written by then."""
        with self.notes.open("a") as file:
            print(text, len(self.out.read_text().splitlines()), file=file)

    def sleep(self) -> None:
        """Be asleep when the action ends; the alarm kills whom the signal does not wake up."""
        signal.alarm(30)
        time.sleep(60)


def exits(it: Scenario) -> None:
    it.start()
    sys.exit(3)


def raises(it: Scenario) -> None:
    it.start()
    raise RuntimeError("the training failed")


def fails_at_exit(it: Scenario) -> None:
    it.start(it.fail)


def fails_before_exit(it: Scenario) -> None:
    it.start(it.fail)
    while it.worker.pending:
        time.sleep(0.01)


def term_by_default(it: Scenario) -> None:
    it.start()
    it.sleep()


def term_when_idle(it: Scenario) -> None:
    it.worker.start("nothing", lambda: None)
    it.worker.wait()
    it.write()


def term_in_wait(it: Scenario) -> None:
    it.start()
    it.worker.wait()
    it.sleep()


def term_in_start(it: Scenario) -> None:
    it.start()
    it.worker.start("saving checkpoint-20", lambda: it.note("started another"))
    it.sleep()


def term_at_exit(it: Scenario) -> None:
    it.start()


def term_and_failure(it: Scenario) -> None:
    it.start(it.fail)
    it.sleep()


def term_to_handler(it: Scenario) -> None:
    signal.signal(TERM, lambda *_: it.note("handled"))
    it.start()
    while it.worker.pending:
        time.sleep(0.01)
    time.sleep(0.05)
    it.note("continued")


def term_to_exit(it: Scenario) -> None:
    def leave(*_: object) -> None:
        it.note("handled")
        sys.exit(7)

    signal.signal(TERM, leave)
    it.start()
    it.sleep()


def term_while_holding_a_lock(it: Scenario) -> None:
    """The action needs a lock that the main thread has when the signal comes."""
    lock = threading.Lock()

    def action() -> None:
        it.write()
        with lock:
            it.note("had the lock")

    with lock:
        it.start(action)
        while len(it.out.read_text().splitlines()) < LINES:
            time.sleep(0.01)
        time.sleep(0.1)
    it.sleep()


def interrupted_at_the_end(it: Scenario) -> None:
    """Ctrl-C in the last wait of a script: the interpreter still finishes the action."""
    it.start()
    try:
        it.worker.wait()
    except KeyboardInterrupt:
        it.note(f"pending {it.worker.pending}")
        raise


def forked(it: Scenario) -> None:
    it.start(it.fail)
    child = os.fork()
    if child == 0:
        if it.worker.pending or signal.getsignal(TERM) != signal.SIG_DFL:
            os._exit(1)
        it.worker.wait()
        it.worker.start("something of the child's own", lambda: None)
        it.worker.close()
        if signal.getsignal(TERM) != signal.SIG_DFL:
            os._exit(2)
        os.kill(os.getpid(), TERM)
        time.sleep(5)
        os._exit(3)
    it.note(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    # The parent's failure is still the parent's.
    try:
        it.worker.wait()
    except OSError as error:
        it.note(f"raised {error.errno}")


def _group(it: Scenario) -> None:
    """Two ranks whose actions end with a collective over a group of their own."""
    rank = int(it.out.stem[-1])
    store = it.out.with_name(it.out.stem[:-2] + ".store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))

    def action() -> None:
        it.write()
        total = torch.ones(1000)
        dist.all_reduce(total, group=group)
        it.note(f"sum {int(total.sum())}")

    it.start(action)


def group_returns_0(it: Scenario) -> None:
    _group(it)


def group_returns_1(it: Scenario) -> None:
    _group(it)


def group_term_0(it: Scenario) -> None:
    _group(it)
    it.sleep()


def group_term_1(it: Scenario) -> None:
    _group(it)
    it.sleep()


SCENARIOS: dict[Callable[[Scenario], None], tuple[int, ...]] = {
    exits: (),
    raises: (),
    fails_at_exit: (),
    fails_before_exit: (),
    term_by_default: (TERM,),
    term_when_idle: (TERM,),
    term_in_wait: (TERM,),
    term_in_start: (TERM,),
    term_at_exit: (TERM,),
    term_and_failure: (TERM,),
    term_to_handler: (TERM, TERM),
    term_to_exit: (TERM,),
    term_while_holding_a_lock: (TERM,),
    interrupted_at_the_end: (INT,),
    forked: (),
    group_returns_0: (),
    group_returns_1: (),
    group_term_0: (TERM,),
    group_term_1: (TERM,),
}
"""The scenarios, and the signals that each of them gets while its action runs."""


def fork_scenario(directory: Path, scenario: Callable[[Scenario], None]) -> int:
    """Fork. Returns the child's process id here, and 0 in the child, which then has its scenario to play."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(directory / f"{scenario.__name__}.err", os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 2)
        logging.basicConfig(level=logging.INFO, force=True)
        scenario(Scenario(directory, scenario.__name__, SCENARIOS[scenario]))
    return child


def send_signals(directory: Path, name: str, child: int, signals: tuple[int, ...]) -> None:
    while not (directory / f"{name}.running").exists():
        time.sleep(0.002)
    for number in signals:
        time.sleep(0.02)
        os.kill(child, number)
    (directory / f"{name}.signalled").touch()


def main(directory: Path) -> None:
    children: dict[str, int] = {}
    os.environ["TAKE_APART"] = "1"  # what `warm_server.py` would spare them
    # A child that looks for garbage in what is there now, as at its end, would copy all of its pages.
    gc.freeze()
    for scenario in SCENARIOS:
        child = fork_scenario(directory, scenario)
        if child == 0:
            return
        children[scenario.__name__] = child
    for scenario, signals in SCENARIOS.items():
        name = scenario.__name__
        threading.Thread(target=send_signals, args=(directory, name, children[name], signals)).start()
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for name, child in children.items()}
    (directory / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
