"""What ranks send one another about their data, without being disturbed by a worker process that dies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from dataloader_dispatch.batch_codec import BatchCodec
from dataloader_dispatch.errors import DataError
from dataloader_dispatch.rank_group import RankGroup
from dist_env import RankFailedError, encode_value

T = TypeVar("T")

_SHORT = 1024
"""Bytes of a message that goes in one exchange."""
_HEAD = 8
_HAS, _ENDED, _FAILED = range(3)


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


class Exchange:
    """Exchanges among the ranks of a group, one after another, the same on every rank.

    torch's loaders raise where they learn of a worker's death: in the main thread, wherever it is. Here it
    is mostly waiting for other ranks, who would miss this rank then. So such an error is kept for
    `take_interruption` while the exchange goes on.

    Args:
        group: The ranks, at least two.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._interruption: Exception | None = None
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def gather(self, doing: str, value: T) -> list[T]:
        """The values of all ranks, in their order.

        Args:
            doing: What the ranks are doing, for the message.
            value: Something short that `encode_value` takes, of the same type on every rank.

        Raises:
            RankFailedError: A rank is lost, or its message cannot be read.
        """
        message = encode_value(value)
        heads = self._gather_bytes(doing, len(message).to_bytes(_HEAD, "big") + message, _SHORT)
        sizes = [int.from_bytes(head[:_HEAD], "big") for head in heads]
        self.group.check_sizes(doing, sizes)
        messages = [head[_HEAD:] for head in heads]
        if max(sizes) > _SHORT - _HEAD:
            messages = self._gather_bytes(doing, message, max(sizes))
        own = [message[:size] for message, size in zip(messages, sizes, strict=True)]
        return self.group.decode_all(doing, own, value)

    def broadcast(self, doing: str, batch: object, source: int) -> object:
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
        if self.group.index == source:
            try:
                message = codec.encode(batch)
            except DataError as error:
                problem = str(error)
        problem = self.gather(doing, problem)[source]
        if problem:
            raise DataError(f"{doing}: {problem}")
        size = self.gather(doing, len(message))[source]
        try:
            data = _tensor(message, size) if message else torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise self.group.unreadable(doing, source, error) from error
        self._finish(doing, self.group.broadcast(data, source))
        try:
            return codec.decode(data.numpy().tobytes())
        except ValueError as error:
            raise self.group.unreadable(doing, source, error) from error

    def start_flags(self, *, has: bool, failed: bool) -> None:
        """Say whether this rank has another batch, or its loader has failed; `wait_flags` waits for it."""
        self._flags = torch.zeros(3, dtype=torch.uint8)
        self._flags[_FAILED if failed else _HAS if has else _ENDED] = 1
        self._work = self.group.all_reduce_max(self._flags)

    def wait_flags(self) -> Flags:
        """What the ranks have said.

        Raises:
            RankFailedError: A rank is lost.
        """
        self._finish("agreeing on the end of data", self._work)
        has, ended, failed = self._flags.tolist()
        return Flags(bool(has), bool(ended), bool(failed))

    def take_interruption(self) -> Exception | None:
        """What was raised during an exchange, if anything was."""
        error, self._interruption = self._interruption, None
        return error

    def _gather_bytes(self, doing: str, message: bytes, size: int) -> list[bytes]:
        received = [torch.empty(size, dtype=torch.uint8) for _ in self.group.ranks]
        own = _tensor(message[:size], size)
        self._finish(doing, self.group.all_gather(received, own))
        return [part.numpy().tobytes() for part in received]

    def _finish(self, doing: str, work: dist.Work | None) -> None:
        while work is not None:
            try:
                self.group.wait(doing, work)
            except RankFailedError:
                raise
            except RuntimeError as error:  # raised by a signal handler: the exchange is still under way
                self._interruption = error
            else:
                return


def _tensor(message: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
