"""What gloo can be asked about its connections, and how they are cut."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from dataloader_dispatch.dispatch.message import PROBE_TAG
from dataloader_dispatch.rank_group import RankGroup

_MOMENT = timedelta(milliseconds=1)


class Connection:
    """The connections of this rank to the others of a group.

    Args:
        group: Several ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._transport = group.process_group
        # Receives into it are posted and never answered.
        self._unanswered = torch.zeros(1, dtype=torch.uint8)

    def send(self, buffer: torch.Tensor, index: int, tag: int) -> dist.Work:
        """Start to send to a rank.

        Raises:
            RuntimeError: The connection is broken, or was cut.
        """
        return self._opened().send([buffer], index, tag)

    def receive(self, buffer: torch.Tensor, index: int, tag: int) -> dist.Work:
        """Start to receive from a rank; a shorter message than the buffer leaves its end alone.

        Raises:
            RuntimeError: The connection is broken, or was cut.
        """
        return self._opened().recv([buffer], index, tag)

    def fault(self, index: int) -> RuntimeError | None:
        """What is wrong with the connection to a rank."""
        try:
            # A broken connection refuses to post.
            self.receive(self._unanswered, index, PROBE_TAG)
        except RuntimeError as error:
            return error
        return None

    def cut(self, indices: Iterable[int]) -> None:
        """Close all connections to these ranks; every wait for them, on any thread, ends with an error.

        Destroying a process group does not do that while there is a transfer that somebody still holds.
        """
        for index in indices:
            try:
                # gloo closes all connections of a group where a receive times out. It has no other way.
                self.receive(self._unanswered, index, PROBE_TAG).wait(_MOMENT)
            except RuntimeError:
                continue  # as it should
        self._transport = None

    def _opened(self) -> dist.ProcessGroup:
        if self._transport is None:
            raise RuntimeError("the data loader was closed")
        return self._transport
