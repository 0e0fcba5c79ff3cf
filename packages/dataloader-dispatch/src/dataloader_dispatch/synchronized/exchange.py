"""What ranks that stop together tell one another, and their user."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

import torch
import torch.distributed as dist

from dataloader_dispatch.connection import BatchCodec, data_errors
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup, RankFailedError, get_logger

_logger = get_logger("dataloader_dispatch")

_HAS, _ENDED, _FAILED = range(3)
_LOOK_SECONDS = 0.2
_HEARD_SECONDS = 5.0
_RANKS_PER_LOOK_SECOND = 5000.0
"""So many questions a second the store is asked at most, whatever the number of ranks."""


@dataclass(frozen=True)
class Flags:
    """What is true of some rank.

    Attributes:
        has: It has another batch.
        ended: It has none.
        failed: Its loader raised.
    """

    has: bool
    ended: bool
    failed: bool


class Exchange(ControlGroup):
    """Exchanges among the ranks of a group, one after another, the same on every rank.

    torch's loaders raise where they learn of a worker's death: in the main thread, wherever it is. Here it
    is mostly waiting for other ranks, who would miss this rank then. So such an error is kept for
    `take_interruption` while the exchange goes on.

    Args:
        ranks: Global ranks, this one among them.
        timeout_seconds: How long an exchange may take.
    """

    _interruption: Exception | None = None

    def __init__(self, ranks: Sequence[int], timeout_seconds: float) -> None:
        with data_errors():
            super().__init__(ranks, timeout_seconds, doing="opening the data loader")
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def wait(self, doing: str, work: dist.Work) -> None:
        """Wait for an exchange to end; what else is raised meanwhile is kept.

        Raises:
            RankFailedError: A rank is lost, or the exchange took longer than the timeout.
        """
        while True:
            try:
                return super().wait(doing, work)
            except RankFailedError:
                raise
            except RuntimeError as error:  # raised by a signal handler: the exchange is still under way
                self._interruption = error

    def send_batch(self, doing: str, batch: object, source: int) -> object:
        """The batch of one rank, on every rank.

        Args:
            doing: What the ranks are doing, for the message.
            batch: A batch on the CPU; that of the source counts.
            source: Position of that rank among those of the group.

        Raises:
            DataError: The batch cannot be sent; on every rank.
            RankFailedError: A rank is lost, or its message cannot be read.
        """
        codec, message, problem = BatchCodec(), b"", ""
        if self.index == source:
            try:
                message = codec.encode(batch)
            except DataError as error:
                problem = str(error)
        problem = self.gather(doing, problem)[source]
        if problem:
            raise DataError(f"{doing}: {problem}")
        size = self.gather(doing, len(message))[source]
        try:
            data = torch.empty(size, dtype=torch.uint8)
            if message:
                data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        except RuntimeError as error:
            raise self.unreadable(doing, source, error) from error
        self.wait(doing, self.broadcast(data, source))
        try:
            return codec.decode(data.numpy().tobytes())
        except ValueError as error:
            raise self.unreadable(doing, source, error) from error

    def start_flags(self, *, has: bool, failed: bool) -> None:
        """Say whether this rank has another batch, or its loader has failed; `wait_flags` waits for it."""
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._flags[_FAILED if failed else _HAS if has else _ENDED] = 1
        self._work = self.all_reduce_max(self._flags)

    def wait_flags(self) -> Flags:
        """What the ranks have said.

        Raises:
            RankFailedError: A rank is lost.
        """
        if self._work is not None:
            self.wait("agreeing on the end of data", self._work)
        has, ended, failed = self._flags.tolist()
        return Flags(bool(has), bool(ended), bool(failed))

    def take_interruption(self) -> Exception | None:
        """What was raised during an exchange, if anything was."""
        error, self._interruption = self._interruption, None
        return error


@dataclass(frozen=True)
class Alarm:
    """Why a rank cannot go on.

    Attributes:
        index: Position of the rank among those of the group.
        text: What happened.
        is_failure: Whether its loader raised; otherwise it ended before its length.
    """

    index: int
    text: str
    is_failure: bool


class FailureSignal:
    """Looks out for the alarms of other ranks, in a thread of its own, for the time of one pass.

    A rank that knows of a trouble one batch ahead raises the alarm, waits until the threads of the others
    have heard it, and only then lets its user have the batch before. So the others know before they begin
    a step in which that rank would be missing, and a pass without trouble costs no exchange at all.

    Args:
        group: The ranks.
        number: Number of the pass, the same on all ranks.
    """

    def __init__(self, group: ControlGroup, number: int) -> None:
        self._store = group.store(f"failure signal/{number}")
        self._size = group.size
        self._seconds = max(_LOOK_SECONDS, group.size / _RANKS_PER_LOOK_SECOND)
        self._ended = threading.Event()
        self.alarm: Alarm | None = None
        self._thread = threading.Thread(
            target=self._listen, name="dataloader_dispatch failure signal", daemon=True
        )
        self._thread.start()
        # A thread inside the store while the interpreter goes away would take the process down.
        atexit.register(self.close)

    def raise_alarm(self, alarm: Alarm) -> None:
        """Tell the other ranks, and wait a few seconds at most until they have heard it."""
        self._store.set("alarm", json.dumps(asdict(alarm)))
        end = time.monotonic() + max(_HEARD_SECONDS, 3 * self._seconds)
        while self._store.add("heard", 0) < self._size and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 10)

    def look(self) -> Alarm | None:
        """The alarm, if there is one, by asking now."""
        if self.alarm is None and self._store.check(["alarm"]):
            self.alarm = Alarm(**json.loads(self._store.get("alarm")))
        return self.alarm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
        atexit.unregister(self.close)

    def _listen(self) -> None:
        try:
            while not self._ended.wait(self._seconds):
                if self.look() is not None:
                    self._store.add("heard", 1)
                    return
        except dist.DistNetworkError:
            # The store went with the process that held it. Nobody can raise an alarm now, and the closing
            # agreement of the pass will say who is lost.
            return


@dataclass
class WarnOnce:
    """Warnings of one loader, each kind given once and by one rank.

    Args:
        group: The ranks; the first one speaks. All of them are to come here, so that they agree on what was
            said.
    """

    group: ControlGroup
    _said: set[str] = field(default_factory=set)

    def was_said(self, kind: str) -> bool:
        """Whether a warning of this kind was given."""
        return kind in self._said

    def say(self, kind: str, message: str) -> None:
        """Give a warning, unless one of its kind was given."""
        if kind not in self._said and self.group.index == 0:
            _logger.warning(message)
        self._said.add(kind)

    def say_here(self, message: str) -> None:
        """Give a warning that concerns this rank alone."""
        _logger.warning("%s: %s", self.group.name(self.group.index), message)
