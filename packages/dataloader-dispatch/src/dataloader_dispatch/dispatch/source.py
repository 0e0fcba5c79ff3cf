"""The rank that loads: a background thread reads and sends, and keeps the batches of its own rank."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from dataloader_dispatch.batches import dense_to_device
from dataloader_dispatch.connection import encode_error, note_origin, one_line, run_finalizer
from dataloader_dispatch.dispatch.reader import Position, Reader, Round, Snapshot, outdated
from dataloader_dispatch.dispatch.sender import LostRank, Outbox
from dist_env import ControlGroup, RankFailedError, RankTimeoutError

_DOING = "dispatching batches"
_LOOK_SECONDS = 0.5
_QUICK_SECONDS = 5e-4
"""A loader whose rounds take less on average costs no more than their transport.

Then more than one travels in a message. Whoever waits for the first of them waits for the last too, so a
loader that is quick now and then does not get there; a quick one that a busy host holds up now and then does.
"""
_AVERAGED_ROUNDS = 32
"""The average forgets what is longer ago."""
_MOST_TOGETHER = 8
_FAREWELL_SECONDS = 30.0
"""How long the others may take for the end of a pass before the root leaves."""
_FAILURE_SECONDS = 5.0
"""The same where something has failed, or the root leaves in the middle of a pass."""
_END_OF_READ_SECONDS = 5.0
"""How long a read that is going on may take before the root leaves without waiting for it."""


class Source:
    """The rank that loads, where there are several. All public methods belong to the training thread.

    Args:
        reader: The rounds.
        outbox: Where they go.
        group: The ranks; this one is the root.
        prefetch: Rounds to have ready for the root itself.
        timeout_seconds: How long `take` waits.
        share: Position of this rank's own batch in a round.
        device: Where its tensors are to be.
    """

    def __init__(
        self,
        reader: Reader,
        outbox: Outbox,
        group: ControlGroup,
        prefetch: int,
        timeout_seconds: float,
        share: int,
        device: torch.device,
    ) -> None:
        self._reader = reader
        self._outbox = outbox
        self._group = group
        self._prefetch = prefetch
        self._timeout_seconds = timeout_seconds
        self._share = share
        self._device = device
        self.is_dummy = False
        self._changed = threading.Condition()
        self._ready: deque[Round | BaseException] = deque()
        self._generation = 0
        self._active = False
        self._closing = False
        self._finished = True
        self._breaking = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dataloader-dispatch", daemon=True)

    def start_pass(self) -> int:
        """Begin a pass, and give up the one before. Returns its number, from 1."""
        self._reader.generator.draw()
        with self._changed:
            self._check_usable()
            self._generation += 1
            self._active, self._finished = True, False
            self._ready.clear()
            self._changed.notify_all()
        if not self._thread.is_alive():
            self._thread.start()
        self.is_dummy = False
        return self._generation

    def take(self, number: int) -> Any:
        """This rank's next batch of a pass.

        Raises:
            StopIteration: The pass has ended.
            RuntimeError: A newer pass was begun, or the position was changed.
            RankFailedError: A rank is lost.
            RankTimeoutError: Nothing came within the timeout.
            Exception: Whatever the loader raised.
        """
        taken = self._next_round(number)
        self._reader.consumed(taken)
        if not taken.batches:
            raise StopIteration
        self.is_dummy = self._share >= taken.real
        return dense_to_device(taken.batches[self._share], self._device)

    def epoch(self) -> int:
        return self._snapshot().epoch

    def progress(self) -> float:
        return self._snapshot().progress

    def set_epoch(self, epoch: int) -> None:
        self._retire()
        self._reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        return copy.deepcopy(self._snapshot().state or {})

    def move(self, go: Callable[[Position], None]) -> None:
        self._retire()
        self._reader.move(go)

    def paused(self) -> AbstractContextManager[object]:
        return self._reader.paused()

    def end_workers(self) -> None:
        self._leave_pass()
        self._reader.end_workers()

    def close(self) -> None:
        """End the thread. Before that, what was sent reaches everyone who still takes it."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        own = threading.current_thread() is self._thread  # as when the garbage collector runs in it
        run_finalizer(self._leave, wait=not own)
        if self._thread.is_alive() and not own:
            self._thread.join(_END_OF_READ_SECONDS)
            if not self._thread.is_alive():
                self._reader.drop()

    def _next_round(self, generation: int) -> Round:
        """This rank's next round of a pass, without batches at its end."""
        start = time.monotonic()
        with self._changed:
            # What is ready was sent to all: a rank that took it, and left, is missed only behind it.
            while not (self._is_current(generation) and self._ready):
                self._check_usable()
                if not self._is_current(generation):
                    raise outdated()
                if not self._changed.wait(_LOOK_SECONDS) and self._broken is None:
                    self._look(time.monotonic() - start)
            item = self._ready[0]
            if isinstance(item, Round) and item.batches:
                self._ready.popleft()
                if len(self._ready) == self._prefetch - 1:  # nobody waits for more room than that
                    self._changed.notify_all()
            else:
                self._finished = True  # It stays, for whoever asks again.
        if isinstance(item, BaseException):
            raise item
        return item

    def _is_current(self, generation: int) -> bool:
        """Whether a pass still continues."""
        return self._active and generation == self._generation and not self._closing

    def _is_wanted(self, generation: int) -> bool:
        """Whether what is read for a pass is delivered: nothing is behind an error that all were told."""
        return self._broken is None and self._is_current(generation)

    def _snapshot(self) -> Snapshot:
        return self._reader.snapshot(self._generation if self._active and not self._finished else None)

    def _retire(self) -> None:
        """Give up the pass that continues, because the position is about to change."""
        with self._changed:
            self._check_usable()
            self._finished = True
        self._leave_pass()

    def _leave_pass(self) -> None:
        """Read no further in the pass that continues; `close` still tells ranks that wait in it."""
        with self._changed:
            self._active = False
            self._ready.clear()
            self._changed.notify_all()

    def _leave(self) -> None:
        ended = self._finished and self._broken is None
        if not self._finished:  # in the middle of a pass, behind all that was sent
            name, rank = self._group.name(0), self._group.ranks[0]
            error = RankFailedError(f"{_DOING}: {name} has closed its data loader or ended.", rank)
            with suppress(LostRank):  # who has left before
                self._outbox.send_failure(self._generation, encode_error(error, name))
        self._outbox.drain(_FAREWELL_SECONDS if ended else _FAILURE_SECONDS)
        self._outbox.cut()

    def _check_usable(self) -> None:
        if self._closing:
            raise RuntimeError("the data loader was closed. Make a new one.")
        if self._broken is not None:
            raise self._broken

    def _look(self, waited: float) -> None:
        """Find out why nothing comes: called while the training thread waits."""
        lost = self._outbox.unreachable()
        if lost is not None:
            self._lose(lost)
        elif waited >= self._timeout_seconds:
            self._break(self._late())

    def _late(self) -> RankTimeoutError:
        index = self._outbox.waiting_for
        if index is None:
            what = f"the loader of {self._group.name(0)} gave no batch for {self._timeout_seconds:g} s"
        else:
            what = f"{self._group.name(index)} took no batch for {self._timeout_seconds:g} s"
        return RankTimeoutError(
            f"{_DOING}: {what}. Look at what that rank does. If it is only slow, raise timeout_seconds.",
            {self._group.ranks[index or 0]: self._group.host(index or 0)},
        )

    def _run(self) -> None:
        done = 0
        while True:
            with self._changed:
                while not (self._closing or self._broken or (self._active and self._generation != done)):
                    self._changed.wait()
                if self._closing or self._broken:
                    return
                done = self._generation
            self._produce(done)

    def _produce(self, generation: int) -> None:
        held: list[Round] = []
        try:
            try:
                self._read_to_end(generation, held)
            except LostRank:
                raise
            except BaseException:
                self._flush(generation, held)  # What came before the error is delivered before it.
                raise
        except LostRank as lost:
            self._lose(lost)
        except BaseException as error:  # noqa: BLE001
            # It is raised where the batches are asked for: here on the training thread, and on every rank.
            self._fail(generation, error)

    def _read_to_end(self, generation: int, held: list[Round]) -> None:
        """Read and send rounds; those in ``held`` are appended to a message that is not on its way yet."""
        cost_s = 2 * _QUICK_SECONDS
        while True:
            start = time.monotonic()
            taken = self._reader.read(generation, lambda: self._is_wanted(generation))
            cost_s += (time.monotonic() - start - cost_s) / _AVERAGED_ROUNDS
            if taken is None or not taken.batches:
                break
            packed = self._outbox.pack(taken.batches)
            if not self._outbox.has_room(packed) and not self._flush(generation, held):
                return
            self._outbox.append(generation, taken, packed)
            held.append(taken)
            is_full = len(held) >= (_MOST_TOGETHER if cost_s < _QUICK_SECONDS else 1)
            if is_full and not self._flush(generation, held):
                return
        if self._flush(generation, held) and taken is not None:
            self._outbox.send_end(generation, taken.after)
            self._offer(generation, [taken])

    def _flush(self, generation: int, held: list[Round]) -> bool:
        """Send the rounds, and have them ready for this rank itself. Returns whether the pass continues."""
        self._outbox.flush()
        rounds = list(held)
        held.clear()
        return self._offer(generation, rounds)

    def _offer(self, generation: int, rounds: list[Round]) -> bool:
        """Have rounds ready, all of them as soon as there is room for one: they are in memory anyway."""
        with self._changed:
            while rounds and self._is_wanted(generation) and len(self._ready) >= self._prefetch:
                self._changed.wait()
            if not self._is_wanted(generation):
                return False
            self._ready.extend(rounds)
            self._changed.notify_all()
            return True

    def _fail(self, generation: int, error: BaseException) -> None:
        where = self._group.name(0)
        try:
            payload = encode_error(error, where)
            note_origin(error, where)
        except Exception as unspeakable:  # noqa: BLE001  # its __str__ or its notes raise
            kind = type(error).__name__
            error = RuntimeError(f"{kind}, which cannot be described: {one_line(unspeakable)}")
            payload = encode_error(error, where)
        if not self._is_wanted(generation):
            return
        try:
            # Sent first: this process may end as soon as the training thread knows.
            self._outbox.send_failure(generation, payload)
        except LostRank as lost:
            self._lose(lost)
            return
        with self._changed:
            if self._is_wanted(generation):
                self._ready.append(error)
                self._changed.notify_all()

    def _lose(self, lost: LostRank) -> None:
        if not self._closing:
            error = self._group.lost(_DOING, lost.index, lost.reason)
            self._break(error, lost.index)

    def _break(self, error: BaseException, lost: int | None = None) -> None:
        """Tell everyone who is left why nothing more will come."""
        with self._changed:
            if self._breaking:
                return
            self._breaking = True
        try:
            self._outbox.send_failure(self._generation, encode_error(error, self._group.name(0)), lost)
        except LostRank as another:
            error.add_note(f"Nor could {self._group.name(another.index)} be told")
        with self._changed:
            self._broken, self._finished = error, True
            self._changed.notify_all()
