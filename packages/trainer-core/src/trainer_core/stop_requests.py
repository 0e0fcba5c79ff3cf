"""Signals and the time limit, as a request to finish the step, save and leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType

EXIT_RESUMABLE = 75
"""Exit code of a run that was asked to stop early and saved: start it again to go on (EX_TEMPFAIL)."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ECHO_SECONDS = 1.0
"""A signal that comes again this soon is the same one: the terminal and a launcher both pass Ctrl-C on."""


class StopRequests:
    """Remembers the first signal, and watches the time limit; the loop asks at its own moments.

    A signal that has come before, a second or more ago, stops at once; one of another kind does not, for
    schedulers send several. A handler that somebody else had installed is called as well. Outside the main
    thread Python delivers no signals, and only time is watched.

    Args:
        max_seconds: Time from entering to the request to stop; None for no limit.
    """

    def __init__(self, max_seconds: float | None = None) -> None:
        self.received: signal.Signals | None = None
        self._received_at: dict[int, float] = {}
        self._deadline: float | None = None
        self._max_seconds = max_seconds
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        if self._max_seconds is not None:
            self._deadline = time.monotonic() + self._max_seconds
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._before.clear()

    @property
    def cause(self) -> str | None:
        """What asked this process to stop: a signal's name or `max_train_seconds`; None if nothing did."""
        if self.received is not None:
            return self.received.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "max_train_seconds"
        return None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if (before_at := self._received_at.setdefault(number, now)) != now:
            if now - before_at < _ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        first, self.received = self.received is None, self.received or signal.Signals(number)
        if first:
            rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE", "1") != "1" else None
            where = f" on rank {rank}" if rank else ""
            end = "finishing the step, then saving; once more to stop at once."
            text = f"\n{self.received.name}{where}: {end}\n"
            # Straight to the descriptor: a handler may interrupt another print, and the terminal may be gone.
            with suppress(OSError):
                os.write(2, text.encode())
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
