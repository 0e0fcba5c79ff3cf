"""Ctrl-C and SIGTERM as a request to finish the step, save and leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptGuard:
    """Remembers the first interrupt; a second one stops at once.

    Nothing is printed here: the terminal may be gone, and a handler runs in the midst of anything.

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
