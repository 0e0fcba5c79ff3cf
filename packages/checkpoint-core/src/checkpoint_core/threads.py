"""Threads: one action divided among several, and one at a time in the background of the main thread.

No lock is held in :class:`BackgroundWorker` that a signal handler could need, and the handler never waits: it
runs in the main thread, in the middle of anything, perhaps while that thread holds a lock that the action is
waiting for (a logging handler's, for one). SIGTERM is held back instead, and sent again by the thread that
has finished the action.
"""

import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType
from typing import NamedTuple, TypeVar

from checkpoint_core.errors import CheckpointError, describe_error

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds until a signal that was not noticed is sent again, at first and later on."""


class InterruptSafeEvent:
    """A ``threading.Event`` that is set once, and that Ctrl-C leaves intact at any point of waiting.

    An interrupt may leave the lock inside ``threading.Event`` taken. ``Thread.join`` does not serve either:
    on Python 3.11 and 3.12 a join that Ctrl-C interrupts marks the living thread as ended, so that neither a
    later join nor the end of the interpreter waits for it (python/cpython issue 90882).
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """To be called once; never blocks."""
        self._is_set = True
        self._lock.release()

    def wait(self) -> None:
        """Block until it is set. May be interrupted by Ctrl-C at any point, and called again."""
        if not self._is_set:
            with self._lock:
                return


def in_threads(
    threads: int, items: Sequence[_Item], action: Callable[[Sequence[_Item]], _Result]
) -> list[_Result]:
    """Divide items among threads, in order.

    ``concurrent.futures`` refuses work once the interpreter is about to exit, which is just when the last
    asynchronous save is written; plain threads do not.

    Args:
        threads: How many threads at most, this one included.
        items: What to divide.
        action: Called once for each consecutive group of items.

    Returns:
        The result for each group.

    Raises:
        BaseException: The first failure of any group, after all have ended.
    """
    count = max(min(threads, len(items)), 1)
    bounds = [len(items) * number // count for number in range(count + 1)]
    groups = [items[begin:end] for begin, end in pairwise(bounds)]
    results: dict[int, _Result] = {}
    failures: list[BaseException] = []
    ended = [InterruptSafeEvent() for _ in range(1, count)]

    def run(number: int) -> None:
        try:
            results[number] = action(groups[number])
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread below
            failures.append(error)
        finally:
            if number:
                ended[number - 1].set()

    helpers = [threading.Thread(target=run, args=(number,)) for number in range(1, count)]
    started = 0
    try:
        for helper in helpers:
            helper.start()
            started += 1
        run(0)
    except BaseException as error:  # noqa: BLE001 - raised below, when no thread uses the file any more
        failures.append(error)
    for event in ended[:started]:
        _wait(event, failures)
    if failures:
        raise failures[0]
    return [results[number] for number in range(count)]


def _wait(event: InterruptSafeEvent, interruptions: list[BaseException]) -> None:
    """Wait to the end: Ctrl-C must not leave a thread writing to a file that is closed by then."""
    while True:
        try:
            return event.wait()
        except BaseException as error:  # noqa: BLE001 - raised by the caller once nothing runs any more
            interruptions.append(error)


class BackgroundWorker:
    """Runs actions in a thread of their own, one after the other, and loses none of them.

    - A failure is logged when it happens, and raised by the next call.
    - An interpreter that ends, normally, by ``sys.exit`` or by an exception, finishes the running action
      first. A failure that no call has raised is logged then, with its traceback.
    - From the first :meth:`start` on the main thread until :meth:`close`, SIGTERM is held back while an
      action runs; the main thread continues meanwhile. Then happens what SIGTERM did before: the earlier
      Python handler is called, or the process dies of the signal. Like every Python signal handler, this one
      runs only when the main thread is in Python code or in a wait of Python's.
    - A forked child has no part in the action: nothing is pending there, and SIGTERM does what it did before.

    All methods are for one thread, usually the main one; the action must not call them.
    """

    def __init__(self) -> None:
        self._run: _Run | None = None
        self._failures: deque[_Failure] = deque()
        self._sigterm = _HeldSignal(self)
        self._closed = False
        _workers.add(self)
        # Called when this object is dropped as well as at exit, where all threads have ended by then.
        weakref.finalize(self, _log_unraised, self._failures)

    @property
    def pending(self) -> bool:
        """Whether an action is running."""
        run = self._run
        return run is not None and not run.finished

    def start(self, what: str, action: Callable[[], None]) -> None:
        """Wait for the previous action, then run another one in the background.

        Args:
            what: What the action does, for messages, such as ``saving checkpoint-10``.
            action: Called once, in another thread. It must not use ``concurrent.futures``, which refuses work
                once the interpreter is ending.

        Raises:
            CheckpointError: This object was closed.
            BaseException: The failure of the previous action, as it was raised there. Nothing is started.
        """
        self.wait()
        if self._closed:
            raise CheckpointError(f"{what}: nothing can be started after close(). Make a new object.")
        self._sigterm.install(what)
        # The run refers to this object, which so outlives the action.
        run = _Run(what, action, self._fail, self._sigterm)
        try:
            self._run = run
            run.thread.start()
        except BaseException:
            # No room for a thread, or Ctrl-C, which comes before or after the thread has begun.
            if run.give_up():
                self._run = None
            raise

    def wait(self) -> None:
        """Block until no action is running.

        Raises:
            BaseException: The failure of the last action, once.
            KeyboardInterrupt: Ctrl-C was pressed meanwhile. The action continues.
        """
        if self._run is not None:
            self._run.ended.wait()
            self._run = None
        self.check()

    def check(self) -> None:
        """Raise the failure of an action that has ended. Does not block.

        Raises:
            BaseException: The failure, once.
        """
        if self._failures:
            raise self._failures.popleft().error

    def close(self) -> None:
        """Wait, then put back the earlier SIGTERM handler, unless somebody has installed another one since.

        Called from another thread than the main one, it leaves the handler in place, which then only passes
        the signal on. May be called again.

        Raises:
            BaseException: The failure of the last action, once.
            KeyboardInterrupt: Ctrl-C was pressed meanwhile. The action continues, SIGTERM is still held back.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            if not self.pending:
                self._sigterm.uninstall()

    def _fail(self, what: str, error: BaseException) -> None:
        error.add_note(f"This happened in the background while {what}.")
        self._failures.append(_Failure(what, error))
        text = "%s failed in the background: %s. The next call raises this error"
        _logger.error(text, what, describe_error(error))

    def _forget(self) -> None:
        self._run = None
        self._failures.clear()
        self._sigterm.forget()


class _Failure(NamedTuple):
    what: str
    error: BaseException


class _Run:
    """One action and its thread."""

    def __init__(
        self,
        what: str,
        action: Callable[[], None],
        on_failure: Callable[[str, BaseException], None],
        sigterm: "_HeldSignal",
    ) -> None:
        self.finished = False
        self.ended = InterruptSafeEvent()
        # Not a daemon: the interpreter waits for it before it ends.
        self.thread = threading.Thread(target=self._execute, name=what)
        self._what = what
        # Whoever takes it decides what becomes of it: the thread, or a start that was interrupted.
        self._action = deque([action])
        self._on_failure = on_failure
        self._sigterm = sigterm

    def give_up(self) -> bool:
        """Take the action away from the thread. False when the thread was first, and so is running it."""
        if self._take() is None:
            return False
        self._finish()
        return True

    def _execute(self) -> None:
        action = self._take()
        if action is None:
            return
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - the next call raises it on the caller's thread
            self._on_failure(self._what, error)
        finally:
            # It holds the memory of what it worked on.
            del action
            self._finish()

    def _take(self) -> Callable[[], None] | None:
        try:
            return self._action.popleft()
        except IndexError:
            return None

    def _finish(self) -> None:
        self.finished = True
        # First the signal, so that a main thread that waits to start another action gets it before.
        self._sigterm.let_go(self._what)
        self.ended.set()
        self._sigterm.insist()


class _HeldSignal:
    """Holds SIGTERM back while an action of a worker runs.

    Every arrival is an entry of ``_arrived``. The handler adds it and then looks whether an action runs; the
    thread ends the action and then looks for an entry. So at least one of the two sees the other, and the one
    that takes the entry acts on it.
    """

    def __init__(self, worker: BackgroundWorker) -> None:
        # Weak, so that the table of signal handlers does not keep a worker that nobody closed.
        self._worker = weakref.ref(worker)
        self._arrived: deque[int] = deque()
        # One object, because every look at a method makes another one.
        self._handler = self._on_signal
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._installed = False
        self._told = False
        self._sent_again = False

    def install(self, what: str) -> None:
        """Put the handler in place, if that has not been done; where it cannot be, say so once."""
        before = signal.getsignal(signal.SIGTERM)
        if self._installed or before == signal.SIG_IGN:
            return
        thread = threading.current_thread()
        if thread is threading.main_thread() and before is not None:
            # Before the handler can be called.
            self._before = before
            self._installed = True
            signal.signal(signal.SIGTERM, self._handler)
        elif not self._told:
            self._told = True
            reason = "its handler was not installed from Python"
            if before is not None:
                reason = f"this was started from thread {thread.name!r}, and only the main thread may hold it"
            _logger.warning("SIGTERM will not wait for %s: %s", what, reason)

    def uninstall(self) -> None:
        """Put the earlier handler back if ours is still in place."""
        # Another handler may call ours; then ours stays and passes on what it gets.
        in_place = self._installed and signal.getsignal(signal.SIGTERM) == self._handler
        if in_place and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._installed = False

    def forget(self) -> None:
        """Drop what has arrived, and uninstall."""
        self._arrived.clear()
        self.uninstall()

    def let_go(self, what: str) -> None:
        """Send the signal again if it has arrived. Called when the action has ended."""
        if self._take():
            _logger.info("SIGTERM arrived while %s; that is finished, and SIGTERM takes effect now", what)
            self._sent_again = True
            self._send()

    def insist(self) -> None:
        """Repeat the signal until its handler has run.

        One that comes just before the main thread falls asleep in a system call does not wake it up.
        """
        pause = _FIRST_PAUSE
        while self._sent_again:
            time.sleep(pause)
            # A handler of somebody else may never call ours.
            if self._sent_again and signal.getsignal(signal.SIGTERM) == self._handler:
                self._send()
            else:
                return
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _send(self) -> None:
        # To the thread that runs the handler.
        signal.pthread_kill(threading.main_thread().ident or threading.get_ident(), signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._sent_again = False
        self._arrived.append(number)
        worker = self._worker()
        if (worker is None or not worker.pending) and self._take():
            self._pass_on(number, frame)

    def _take(self) -> bool:
        try:
            self._arrived.popleft()
        except IndexError:
            return False
        # Launchers often send it twice; what has come during one action is one request to end.
        self._arrived.clear()
        return True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        else:
            # Only the system's own action makes the parent see that the signal ended this process.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_workers: weakref.WeakSet[BackgroundWorker] = weakref.WeakSet()


def _forget_all() -> None:
    for worker in list(_workers):
        worker._forget()


os.register_at_fork(after_in_child=_forget_all)


def _log_unraised(failures: deque[_Failure]) -> None:
    while failures:
        what, error = failures.popleft()
        text = "%s had failed in the background, and no later call has raised it: %s"
        _logger.error(text, what, describe_error(error), exc_info=error)
