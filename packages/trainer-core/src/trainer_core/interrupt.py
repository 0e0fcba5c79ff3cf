"""Ctrl-C and SIGTERM as a request to finish the step, save and leave."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Remembers the first interrupt; a second one stops at once.

    Committed checkpoints survive either way. Outside the main thread Python delivers no signals, and
    the guard does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        message = (
            f"\n{self.received.name}: finishing what is under way, then saving; once more to stop at once.\n"
        )
        # Straight to the descriptor: a handler may interrupt another print, and the terminal may be gone.
        with suppress(OSError):
            os.write(2, message.encode())
