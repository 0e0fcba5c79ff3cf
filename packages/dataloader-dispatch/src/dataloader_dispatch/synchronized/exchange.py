"""What ranks that stop together tell one another, and their user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dataloader_dispatch.connection import BatchCodec, data_errors
from dataloader_dispatch.errors import DataError
from dist_env import ControlGroup, RankFailedError, get_logger

_logger = get_logger("dataloader_dispatch")


class Flags(NamedTuple):
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
    `take_interruption` while the exchange continues.

    Args:
        ranks: Global ranks, this one among them.
        timeout_seconds: How long an exchange may take.
    """

    _interruption: Exception | None = None
    _work: dist.Work | None = None

    def __init__(self, ranks: Sequence[int], timeout_seconds: float) -> None:
        with data_errors():
            super().__init__(ranks, timeout_seconds, doing="opening the data loader")
        self._warned: set[str] = set()

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

    def close(self) -> None:
        """Close the connections of this rank; not collective."""
        if self._work is not None and not self._work.is_completed():
            self._is_torn = True  # nobody waits for it any more, and the group would until its timeout
        super().close()

    def take_interruption(self) -> Exception | None:
        """What was raised during an exchange, if anything was."""
        error, self._interruption = self._interruption, None
        return error

    def start_flags(self, *, has: bool, failed: bool) -> None:
        """Say whether this rank has another batch, or its loader has failed; `wait_flags` waits for it."""
        own = Flags(has and not failed, not has and not failed, failed)
        self._flags = torch.tensor(own, dtype=torch.uint8)
        self._work = self.all_reduce_max(self._flags)

    def wait_flags(self) -> Flags:
        """What the ranks have said.

        Raises:
            RankFailedError: A rank is lost.
        """
        if self._work is not None:
            self.wait("agreeing on the end of data", self._work)
        self._work = None
        return Flags(*map(bool, self._flags.tolist()))

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
        problem, size = self.gather(doing, (problem, len(message)))[source]
        if problem:
            raise DataError(f"{doing}: {problem}")
        try:
            data = torch.empty(size, dtype=torch.uint8)
            if message:
                data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        except (RuntimeError, TypeError) as error:
            raise self.unreadable(doing, source, error) from error
        self.wait(doing, self.broadcast(data, source))
        try:
            return codec.decode(data.numpy().tobytes())
        except ValueError as error:
            raise self.unreadable(doing, source, error) from error

    def was_warned(self, kind: str) -> bool:
        """Whether a warning of this kind was given."""
        return kind in self._warned

    def warn_once(self, kind: str, message: str) -> None:
        """Give a warning, on the first rank, unless one of its kind was given; all ranks come here."""
        if self.index == 0 and kind not in self._warned:
            _logger.warning(message)
        self._warned.add(kind)
