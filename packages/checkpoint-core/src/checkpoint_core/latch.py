"""Waiting for the end of a thread, whatever interrupts the waiting."""

import threading


class Latch:
    """Opens once, and lets everybody through who waits for that.

    ``Thread.join`` does not serve: on Python 3.11 and 3.12 a join that Ctrl-C interrupts marks the living
    thread as ended, so that neither a later join nor the end of the interpreter waits for it (python/cpython
    issue 90882).
    """

    def __init__(self) -> None:
        self._is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Open it. To be called once; never blocks."""
        self._is_open = True
        self._lock.release()

    def wait(self) -> None:
        """Block until it is open. May be interrupted by Ctrl-C at any point, and called again."""
        if not self._is_open:
            with self._lock:
                return
