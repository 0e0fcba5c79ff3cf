"""Trains many models in turn, some steps each, so that all of them see the same state of the machine.

A difference of one hundredth of a step drowns where whole runs follow one another: on a shared machine a
step costs some percent more or less from one second to the next. Here every contender has a thread of its
own and stops in its model's ``forward`` until it is its turn again; only one of them ever runs. Nothing in
a loop has to know about it. Processor time is that of the thread, which waiting does not add to.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

from _step_work import WARM_UP, Clock, Window

TURN = 20
"""Steps of a turn: each has one log entry at 20 steps between entries, two at 10, twenty at 1."""


class TurnClock(Clock):
    """Hands over after the warm-up and after each turn, and notes what the turn has cost."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Window] = []
        """Milliseconds per step."""
        self._began: tuple[float, float] | None = None
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._error: BaseException | None = None

    def tick(self) -> None:
        """Count a step that begins; between two turns, wait."""
        if self.steps >= WARM_UP and (self.steps - WARM_UP) % TURN == 0:
            if self._began is not None:
                cpu, wall = (time.thread_time(), time.perf_counter())
                self.turns.append(
                    Window((cpu - self._began[0]) / TURN * 1e3, (wall - self._began[1]) / TURN * 1e3)
                )
            self._paused.release()
            self._go.acquire()
            self._began = (time.thread_time(), time.perf_counter())
        self.steps += 1

    def start(self, train: Callable[[], object]) -> None:
        """Begin a run in a thread, which waits for its first turn."""
        threading.Thread(target=self._run, args=(train,), daemon=True).start()

    def take_turn(self) -> None:
        """Let the run go on until it hands over or ends.

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
        except BaseException as error:
            self._error = error
        finally:
            self._paused.release()


def take_turns(runs: Mapping[str, tuple[TurnClock, Callable[[], object]]], rounds: int) -> None:
    """Train all of them to their ends, one turn each in every round, in an order drawn anew.

    Args:
        runs: By label, the clock in a model and what trains that model for `WARM_UP` steps, `TURN` steps for
            each round, and one more.
        rounds: How many turns each has.
    """
    drawn, clocks = random.Random(0), {label: clock for label, (clock, _) in runs.items()}
    for clock, train in runs.values():
        clock.start(train)
        clock.take_turn()  # set-up and warm-up
    order = list(clocks)
    for _ in range(rounds):
        drawn.shuffle(order)
        for label in order:
            clocks[label].take_turn()
    for label, clock in clocks.items():
        clock.take_turn()  # to the end
        if len(clock.turns) != rounds:
            raise RuntimeError(f"{label} had {len(clock.turns)} turns of {rounds}")
