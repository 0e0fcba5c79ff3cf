"""Matrices sent as two thin factors, with what is left out added to the next gradient."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from checkpoint_core import SharingPattern, StateComponent
from trainer_core import ConfigurationError, Traffic

from ..arguments import CompressionArguments
from .base import GradientCompression
from .low_rank import LowRankGradient
from .matrices import matrix_shapes
from .memory import Memories

# No `from __future__ import annotations` here: DDP compares the annotations of its hook with types.


class PowerSGD(GradientCompression):
    """PowerSGD with warm start and error feedback; see `LowRankGradient` for the formulas and the paper.

    torch has a hook of this name that keeps its memory by bucket. Buckets change after the first step of a
    process, so it cannot go on exactly from a checkpoint. Here the memory goes by name, and where ranks are
    added in the same order whatever the bucket (two always are), neither buckets nor a restart change a bit.

    Ranks must compute alike: each works out the same basis from the same numbers, so processors or libraries
    that round differently let the replicas drift apart.

    Memory: per compressed parameter its size in float32, on the device and in each rank's checkpoint.

    Args:
        settings: Rank of the factors, first step, and what is worth compressing.
        model: The model, unwrapped.
        process_group: The ranks that average.
        traffic: Counts what this rank sends.

    Raises:
        ConfigurationError: If no tensor of the model would become small enough.
    """

    def __init__(
        self,
        settings: CompressionArguments,
        model: nn.Module,
        process_group: ProcessGroup | None,
        traffic: Traffic,
    ) -> None:
        super().__init__(process_group, traffic)
        self._start_step = settings.start_step
        self._shapes = matrix_shapes(model, settings)
        if not self._shapes:
            raise ConfigurationError(
                "compression.method",
                settings.method,
                f"makes nothing smaller: with matrix_rank={settings.matrix_rank} no tensor of the model "
                f"shrinks to 1/{settings.min_compression_rate:g} (min_compression_rate)",
                "lower one of them, or leave it out",
            )
        self._memories = Memories(model, self._shapes)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._step = 0

    def register(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of a wrapped model.

        Raises:
            ValueError: If the wrapper is around another model.
        """
        strange = [name for name, parameter in ddp.module.named_parameters() if parameter not in self._names]
        if strange:
            raise ValueError(f"the compression was built for a model without the parameter {strange[0]!r}")
        super().register(ddp)

    def begin(self, step: int) -> None:
        """Note how many optimizer steps are done; from `start_step` on, gradients are compressed."""
        self._step = step

    def state_components(self) -> Sequence[StateComponent]:
        """The component "compression": every rank owes something else."""
        return (StateComponent(key="compression", stateful=self, sharing_pattern=SharingPattern.PER_RANK),)

    def state_dict(self) -> dict[str, object]:
        """Errors and factors by name of the parameter."""
        return self._memories.state_dict()

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Put back what this rank saved."""
        self._memories.load_state_dict(state)

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        """Take up what another number of ranks saved."""
        self._memories.load_resharded(states, rank=rank, world_size=world_size)

    def _reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks, in place.

        The first message is waited for here, not in a callback: callbacks of several buckets run in any
        order, and one that began a collective would pair with another bucket's on the next rank.
        """
        if self._step < self._start_step:
            return self._reduce_whole(bucket)
        buffer = bucket.buffer()
        with _plain_arithmetic(buffer.device):
            matrices, whole = self._split(bucket)
            if not matrices:
                return self._reduce_whole(bucket)
            lefts = [matrix.left() for matrix in matrices]
            first = torch.cat([*lefts, *(gradient.reshape(-1) for gradient in whole)])
            self._begin_average(first).wait()
            means = first.split_with_sizes([part.numel() for part in (*lefts, *whole)])
            rights = [matrix.right(mean) for matrix, mean in zip(matrices, means, strict=False)]
            second = torch.cat(rights)
            work = self._begin_average(second)
            for gradient, mean in zip(whole, means[len(matrices) :], strict=True):
                gradient.copy_(mean.view(gradient.shape))

        def finish(averaged: torch.futures.Future[list[Tensor]]) -> Tensor:
            means = averaged.value()[0].split_with_sizes([right.numel() for right in rights])
            with _plain_arithmetic(buffer.device):
                for matrix, mean in zip(matrices, means, strict=True):
                    matrix.finish(mean)
            return buffer

        future: torch.futures.Future[list[Tensor]] = work.get_future()
        return future.then(finish)

    def _split(self, bucket: GradBucket) -> tuple[list[LowRankGradient], list[Tensor]]:
        """The gradients of a bucket that are compressed, and the others."""
        matrices, whole = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]
            if name in self._shapes:
                own = _with_strides_of(parameter, gradient)
                matrices.append(LowRankGradient(own, self._memories.of(name)))
            else:
                whole.append(gradient)
        return matrices, whole

    def _begin_average(self, message: Tensor) -> dist.Work:
        # Divided before it is summed, as DDP does: 16 bits cannot hold the sum of what they can hold.
        message.div_(self._ranks.size())
        self._traffic.add(message)
        work: dist.Work = dist.all_reduce(message, group=self._ranks, async_op=True)
        return work


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient as DDP laid it into the bucket, for instance channels last.

    DDP gives a gradient the strides of its parameter where these leave no gaps, and hands it to a hook as if
    it were contiguous. `empty_like` follows the same rule.
    """
    return gradient.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Autocast would round the factors, and a thread of the backend records operations for autograd."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
