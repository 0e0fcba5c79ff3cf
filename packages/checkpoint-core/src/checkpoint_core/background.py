"""Asynchronous saves: host memory to copy tensors into, and a thread in which the rest happens.

New memory is slow: the operating system hands out each page at its first touch, which takes several times as
long as the copy. So the memory is kept from save to save.

No lock is held in :class:`BackgroundWorker` that a signal handler could need, and the handler never waits: it
runs in the main thread, in the middle of anything, perhaps while that thread holds a lock that the action is
waiting for (a logging handler's, for one). SIGTERM is held back instead, and sent again by the thread that
has finished the action.
"""

import logging
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NamedTuple, TypeVar

import torch

from checkpoint_core.errors import CheckpointError, describe_error
from checkpoint_core.files import InterruptSafeEvent

ALIGNMENT = 64
"""Every staged tensor begins at a multiple of this many bytes: a cache line, the widest vector register."""
_K = TypeVar("_K")
_logger = logging.getLogger(__name__)
_HUGE_PAGE = 2 * 1024 * 1024
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None
"""MADV_WIPEONFORK of linux/mman.h, which the mmap module does not name."""
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices, not only for the current one.


class StagingBuffer:
    """Memory for copies of tensors, allocated once and used again by every copy.

    It grows when it must and never shrinks. The copies of one :meth:`copy` are overwritten by the next, so
    the caller waits until they are no longer needed. For one thread at a time.
    """

    def __init__(self) -> None:
        self._region: _Region | None = None
        self._told = False

    @property
    def capacity(self) -> int:
        """Bytes allocated; 0 before the first :meth:`copy`, and in a forked child."""
        region = self._current()
        return 0 if region is None else region.bytes.numel()

    def copy(self, tensors: Mapping[_K, torch.Tensor]) -> dict[_K, torch.Tensor]:
        """Copy tensors into the buffer.

        Tensors of an accelerator are copied asynchronously, with one synchronisation of the device at the
        end. Two names for the same memory become two copies.

        Args:
            tensors: Dense tensors of any device, dtype, shape and strides, by any key.

        Returns:
            CPU tensors of the same dtypes and shapes by the same keys: contiguous, detached, 64-byte aligned,
            without pending conjugation or negation. They are views of the buffer, valid until the next copy.

        Raises:
            CheckpointError: The system refuses the memory.
        """
        region = self._region_for(sum(_padded_bytes(tensor) for tensor in tensors.values()))
        # Copies to the host can only overlap on the devices that can be synchronised afterwards.
        accelerator = torch.accelerator.current_accelerator()
        devices = {
            tensor.device
            for tensor in tensors.values()
            if accelerator is not None and tensor.device.type == accelerator.type
        }
        for device in devices:
            region.ensure_pinned(device)
        staged: dict[_K, torch.Tensor] = {}
        offset = 0
        try:
            for key, tensor in tensors.items():
                staged[key] = region.place(tensor, offset, non_blocking=tensor.device in devices)
                offset += _padded_bytes(tensor)
        finally:
            # After an error as well: nothing may still write to the buffer when the caller uses it again.
            for device in devices:
                torch.accelerator.synchronize(device)
        return staged

    def release(self) -> None:
        """Give the memory back. Staged tensors that are still referenced keep theirs."""
        self._region = None

    def _region_for(self, size: int) -> "_Region":
        region = self._current()
        if region is None or region.bytes.numel() < size:
            self._tell_growth(size)
            self.release()
            region = self._region = _Region(size)
        return region

    def _tell_growth(self, size: int) -> None:
        if size and not self._told:
            self._told = True
            _logger.info(
                "the staging buffer grows from %d to %d bytes; this save takes longer, because new memory is "
                "slow at its first use",
                self.capacity,
                size,
            )

    def _current(self) -> "_Region | None":
        # A forked child finds the memory wiped, and its CUDA context gone.
        if self._region is not None and self._region.owner != os.getpid():
            self._region = None
        return self._region


class _HostMemory(mmap.mmap):
    """Anonymous memory of this process, which undoes its pinning before it is given back."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


class _Region:
    """One piece of memory."""

    def __init__(self, size: int) -> None:
        self.owner = os.getpid()
        self._memory = _map_memory(size + _HUGE_PAGE)
        # Memory that began as an inference tensor could only be written to in inference mode.
        with torch.inference_mode(False):
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            # Huge pages need memory that begins where one begins. The slice keeps the mapping alive.
            self.bytes = whole[-whole.data_ptr() % _HUGE_PAGE :][: -size % ALIGNMENT + size]
        self._pinning_tried = False

    def ensure_pinned(self, device: torch.device) -> None:
        """Pin the memory for copies from a device, at the first call; say so when that is not possible."""
        if self._pinning_tried:
            return
        if device.type == "cuda":
            # Not in this thread: CUDA keeps the error of a failed call for the thread's next kernel to raise.
            pinned = InterruptSafeEvent()

            def pin() -> None:
                try:
                    self._pin(device)
                finally:
                    pinned.set()

            # Not a daemon: a thread that is inside torch when the interpreter goes away aborts the process.
            threading.Thread(target=pin, name="checkpoint staging memory").start()
            pinned.wait()
        else:
            self._pinning_tried = True
            self._tell_unpinned(device, f"this is not done for {device.type} devices")

    def _pin(self, device: torch.device) -> None:
        self._pinning_tried = True
        runtime = torch.cuda.cudart()
        address = self.bytes.data_ptr()
        # A new thread begins with device 0, and would take memory there.
        with torch.cuda.device(device):
            code = int(runtime.cudaHostRegister(address, self.bytes.numel(), _REGISTER_PORTABLE))
        if code != 0:
            self._tell_unpinned(device, f"cudaHostRegister returned error {code}; see ulimit -l")
            return
        unregister, owner = runtime.cudaHostUnregister, self.owner
        # A forked child shares the object, but may not call CUDA.
        self._memory.unpin = lambda: unregister(address) if os.getpid() == owner else None

    def _tell_unpinned(self, device: torch.device, reason: str) -> None:
        _logger.warning(
            "%d bytes of staging memory are not pinned (%s); asynchronous saves from %s block longer",
            self.bytes.numel(),
            reason,
            device,
        )

    def place(self, tensor: torch.Tensor, offset: int, *, non_blocking: bool) -> torch.Tensor:
        """Copy one tensor to an offset and return the copy."""
        target = self.bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # Resolved on the source's device: the host would do it before a non-blocking copy has arrived.
        return target.copy_(tensor.detach().resolve_conj().resolve_neg(), non_blocking=non_blocking)


def _map_memory(size: int) -> _HostMemory:
    """Anonymous memory, in huge pages where the system has them: cheaper to provide and to walk through."""
    try:
        memory = _HostMemory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"the system refuses {size} bytes of memory for staging ({error.strerror}). An asynchronous "
            "save holds a second copy of what this rank saves. Free or add memory, or set async_save=False."
        ) from error
    # Without the second, each fork (a data loader's worker) makes the next copy as slow as the first one,
    # because the pages are shared with the child until they are written to.
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
        if advice is not None:
            try:
                memory.madvise(advice)
            except OSError as error:
                _logger.debug("madvise(%d) is not available for staging memory: %s", advice, error)
    return memory


def _padded_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % ALIGNMENT


_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds until a signal that was not noticed is sent again, at first and later on."""


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
        text = "%s failed in the background: %s The next call raises this error"
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
