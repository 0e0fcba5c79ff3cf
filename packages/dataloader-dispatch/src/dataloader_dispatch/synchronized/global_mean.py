"""Means over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dataloader_dispatch.errors import DataError
from dist_env import StaticDistributedEnvironment, barrier


class GlobalMean:
    """The mean of something over all examples of all ranks: one sum, divided once.

    Adding does not wait for the device and sends nothing. Sums are kept in float64 on the device.

    Args:
        process_group: The ranks; None for all. One rank if there is no process group.
        device: Where what is added lives; None for the CPU. With several ranks, a device that the process
            group works on.
        timeout_seconds: How long `compute` waits for the other ranks.

    Raises:
        DataError: ``timeout_seconds`` is not positive.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        *,
        timeout_seconds: float = 600.0,
    ) -> None:
        if not timeout_seconds > 0:
            raise DataError(f"timeout_seconds={timeout_seconds!r} is out of range; it must be positive")
        self.process_group = process_group
        self.timeout_seconds = timeout_seconds
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Add a sum over examples and the number of examples in it.

        Args:
            total: The sum, a number or a tensor of one element; of valid rows only.
            count: How many examples it is the sum of, likewise.
        """
        self._totals[0] += total
        self._totals[1] += count

    def reset(self) -> None:
        """Forget what was added."""
        self._totals.zero_()

    def compute(self) -> float:
        """The mean over all ranks, the same on each of them. Collective.

        The sums of the ranks are added in the order of the ranks, in float64. Up to rounding in float64 the
        result does not depend on how examples are spread over ranks.

        Raises:
            DataError: Nothing was counted on any rank.
            RankTimeoutError: A rank did not come; names it.
        """
        totals = self._gather()
        total, count = sum(part[0] for part in totals), sum(part[1] for part in totals)
        if count == 0:
            raise DataError(
                f"mean over {len(totals)} ranks: nothing was counted on any of them. Check that the "
                "evaluation set is not empty, that drop_last=True does not drop what a rank has (batch_size "
                "times the number of ranks may exceed the set), and that labels and masks leave something to "
                "count"
            )
        return total / count

    def _gather(self) -> list[list[float]]:
        if not (dist.is_available() and dist.is_initialized()):
            return [self._totals.tolist()]
        size = dist.get_world_size(self.process_group)
        if size == 1:
            return [self._totals.tolist()]
        env = StaticDistributedEnvironment(
            rank=dist.get_rank(),
            local_rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
        )
        # A collective of a training backend cannot say who is missing; this can.
        barrier(env, timeout=self.timeout_seconds, process_group=self.process_group, tag="computing a mean")
        parts = [torch.empty_like(self._totals) for _ in range(size)]
        dist.all_gather(parts, self._totals, group=self.process_group)
        return [part.tolist() for part in parts]
