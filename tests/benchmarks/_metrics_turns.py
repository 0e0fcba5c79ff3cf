"""Trains many models in turn, some steps each, so that all of them see the same state of the machine.

A difference of one hundredth of a step drowns where whole runs follow one another: on a shared machine a
step costs some percent more or less from one second to the next. Here every contender has a thread of its
own and stops in its model's ``forward`` until it is its turn again; only one of them ever runs, and those
that are compared hand over to each other every other step. Nothing in a loop has to know about it.
Processor time is that of the thread, which waiting does not add to.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from _step_work import WARM_UP, Clock, Window

STRETCH = 2
"""Steps until the next contender takes over."""
TURN = 20
"""Steps in a round: one log entry at 20 steps between entries, two at 10, twenty at 1, at the same places."""


class TurnClock(Clock):
    """Hands over after the warm-up and after each stretch, and notes what each has cost."""

    def __init__(self) -> None:
        super().__init__()
        self.stretches: list[Window] = []
        """Milliseconds per step, of one stretch after the other."""
        self._began: tuple[float, float] | None = None
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._error: BaseException | None = None

    def tick(self) -> None:
        """Count a step that begins; between two stretches, wait."""
        timed = self.steps - WARM_UP
        if timed >= 0 and timed % STRETCH == 0:
            self._note()
            self._paused.release()
            self._go.acquire()
            self._began = (time.thread_time(), time.perf_counter())
        self.steps += 1

    def _note(self) -> None:
        if self._began is not None:
            cpu, wall = time.thread_time() - self._began[0], time.perf_counter() - self._began[1]
            self.stretches.append(Window(cpu / STRETCH * 1e3, wall / STRETCH * 1e3))

    def start(self, train: Callable[[], object]) -> None:
        """Begin a run in a thread, which waits for its first turn."""
        threading.Thread(target=self._run, args=(train,), daemon=True).start()

    def take_turn(self) -> None:
        """Let the run continue until it hands over, or ends.

        Raises:
            BaseException: What ended it.
        """
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, train: Callable[[], object]) -> None:
        self._go.acquire()
        try:
            train()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error
        finally:
            self._paused.release()


def take_turns(
    runs: Mapping[str, tuple[TurnClock, Callable[[], object]]], groups: Sequence[Sequence[str]], rounds: int
) -> None:
    """Train all of them to their ends, `TURN` steps each in every round.

    The order of the groups, and that within each, is drawn anew in every round.

    Args:
        runs: By label, the clock in a model and what trains that model for `WARM_UP` steps, `TURN` steps for
            each round, and one more.
        groups: The labels of those that hand over to one another.
        rounds: How many there are.
    """
    drawn, clocks = random.Random(0), {label: clock for label, (clock, _) in runs.items()}
    for clock, train in runs.values():
        clock.start(train)
        clock.take_turn()  # set-up and warm-up
    for _ in range(rounds):
        for group in drawn.sample(groups, len(groups)):
            order = drawn.sample(group, len(group))
            for _ in range(TURN // STRETCH):
                for label in order:
                    clocks[label].take_turn()
    for label, clock in clocks.items():
        clock.take_turn()  # to the end
        if len(clock.stretches) * STRETCH != rounds * TURN:
            raise RuntimeError(f"{label} made {clock.steps} steps, other than {rounds} rounds of {TURN}")
