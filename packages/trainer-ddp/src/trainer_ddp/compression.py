"""Gradients made smaller before they travel: rounded to 16 bits, or sent as two thin factors."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from checkpoint_core import SharingPattern, StateComponent
from trainer_core import CommBytes, ConfigurationError

from .arguments import CompressionArguments
from .error_feedback import ErrorFeedback, Residual, matrix_shapes

# No `from __future__ import annotations` here: DDP compares the annotations of its hook with types.

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class GradientCompression(ABC):
    """Takes over the averaging of gradients from DistributedDataParallel.

    Order of calls: `register` once, before the first backward pass; a checkpoint's state, if there is one;
    then `begin` when training begins and after each optimizer step.

    Args:
        process_group: The ranks that average; none for the default group.
        traffic: Counts what this rank sends.
    """

    def __init__(self, process_group: ProcessGroup | None, traffic: CommBytes) -> None:
        # A ProcessGroup: without a default group, torch refuses here.
        self._ranks = dist.distributed_c10d._get_default_group() if process_group is None else process_group
        self._traffic = traffic

    def register(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of a wrapped model.

        Args:
            ddp: The wrapper around the model that the compression was built for.

        Raises:
            RuntimeError: If the wrapper has a hook already.
        """
        ddp.register_comm_hook(None, self._reduce)

    def begin(self, step: int) -> None:
        """Note how far training is.

        Args:
            step: Optimizer steps done, of the whole training: it continues from the checkpoint after a
                restart.
        """
        return

    def state_components(self) -> Sequence[StateComponent]:
        """What must survive a restart; no component for a method that remembers nothing."""
        return ()

    def state_dict(self) -> dict[str, object]:
        """What this rank remembers; empty for a method that remembers nothing."""
        return {}

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Put back what this rank saved."""
        return

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        """Take up what another number of ranks saved.

        Args:
            states: What `state_dict` returned on each of them, in rank order.
            rank: This rank.
            world_size: Number of ranks now.
        """
        return

    @abstractmethod
    def _reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of gradients over the ranks, in place. DDP asks for this signature."""

    def _reduce_whole(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does by itself, and count it."""
        self._traffic.add(bucket.buffer())
        return allreduce_hook(self._ranks, bucket)


class RoundedGradients(GradientCompression):
    """Rounds gradients to 16 bits, averages them in 16 bits, and turns them back: torch's own hooks.

    Args:
        method: fp16 or bf16.
        model: The model. At least one of its trainable parameters must be wider than 16 bits.
        process_group: The ranks that average.
        traffic: Counts what this rank sends.

    Raises:
        ConfigurationError: If that would make nothing smaller, or the backend cannot do it. Collective: a
            tiny tensor is summed to find out.
    """

    def __init__(
        self, method: str, model: nn.Module, process_group: ProcessGroup | None, traffic: CommBytes
    ) -> None:
        super().__init__(process_group, traffic)
        self._dtype = _DTYPES[method]
        self._hook = _HOOKS[method]
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not any(parameter.dtype.itemsize > self._dtype.itemsize for parameter in trainable):
            raise ConfigurationError(
                "compression.method",
                method,
                "makes nothing smaller, because no trainable parameter has more than 16 bits",
                "leave it out",
            )
        _check_backend(method, self._dtype, trainable[0].device, process_group)

    def _reduce(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks; one that has 16 bits already travels as it is."""
        buffer = bucket.buffer()
        if buffer.dtype.itemsize <= self._dtype.itemsize:
            return self._reduce_whole(bucket)
        self._traffic.add(torch.empty(buffer.numel(), dtype=self._dtype, device="meta"))
        return self._hook(self._ranks, bucket)


def _check_backend(
    method: str, dtype: torch.dtype, device: torch.device, process_group: ProcessGroup | None
) -> None:
    # Which backend sums which types depends on how it was built, so the backend is asked, not a table.
    trial = torch.ones(1, dtype=dtype, device=device)
    ranks = dist.get_world_size(process_group)
    try:
        dist.all_reduce(trial, group=process_group)
        if trial.item() != ranks:
            raise RuntimeError(f"the sum of {ranks} ones is {trial.item()}")
    except (RuntimeError, ValueError, TypeError) as error:
        backend = dist.get_backend(process_group)
        raise ConfigurationError(
            "compression.method",
            method,
            f"cannot be used with the backend {backend}, which could not sum {dtype} on {device.type} in a "
            f"trial: {error}",
            "choose another method, or a backend that can",
        ) from error


class LowRankGradient:
    """The gradient of one parameter in one step: `left`, then `right`, then `finish`.

    Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", 2019, arXiv 1905.13727, algorithm 1, with the error feedback of algorithm 2. With this
    rank's gradient G, error E, the factor Q, and "mean" over the ranks:

        M = G + E;  P = mean(M Q);  P = orthonormal basis of P's columns;  R = M^T P
        averaged gradient = P mean(R)^T;  E = M - P R^T;  Q = mean(R) with columns of length 1

    The error takes the rank's own R, as algorithm 2 has it, so each rank keeps just what it did not send, and
    mean(E) is what the averaged gradient leaves out. (With mean(R) instead, mean(E) would be the same, but
    what only this rank's gradients have would pile up in E with nothing to take any of it away.)

    The length of Q's columns does not matter to the result. Length 1 keeps P at the size of the gradient;
    as it comes, P would have the size of its square, which 16 bits cannot hold.

    Args:
        gradient: View of the bucket, of any shape and strides.
        residual: Error and factor of the parameter; both are updated in place.
    """

    def __init__(self, gradient: Tensor, residual: Residual) -> None:
        self._gradient = gradient
        self._residual = residual
        self._largest: Tensor = torch.linalg.vector_norm(gradient, ord=torch.inf)
        # From here to `finish` the error holds M: no copy of the gradient's size is needed.
        residual.error.add_(gradient.reshape(residual.error.shape))

    def left(self) -> Tensor:
        """What is averaged first.

        Returns:
            M Q and one number more, [rows * rank + 1], in the gradient's dtype. The number is 0 where this
            rank's gradient is zero everywhere, nan where it has an element that is not finite, otherwise 1.
        """
        mark = (self._largest > 0).to(self._gradient.dtype)
        mark = mark.masked_fill(~self._largest.isfinite(), torch.nan)
        product = torch.mm(self._residual.error, self._residual.factor)
        return torch.cat([product.reshape(-1).to(self._gradient.dtype), mark.reshape(1)])

    def right(self, mean_left: Tensor) -> Tensor:
        """What is averaged next.

        Args:
            mean_left: The mean of `left` over the ranks.

        Returns:
            R, [columns * rank], in the gradient's dtype.
        """
        error, factor = self._residual.error, self._residual.factor
        product, mark = mean_left[:-1].to(error), mean_left[-1]
        basis: Tensor = torch.linalg.qr(product.view(error.shape[0], factor.shape[1])).Q
        # Nobody has a gradient: nothing is sent. DDP leaves a parameter that no rank has used as it was, and
        # what is owed must not be handed out to nobody.
        basis = basis.masked_fill(mark == 0, 0)
        # All ranks see the same mean, so all of them carry the nan on, into the result and into `finish`.
        self._basis = basis.masked_fill(~mean_left.isfinite().all(), torch.nan)
        right = (error.T @ self._basis).to(self._gradient.dtype)
        self._own = right.to(error)
        return right.reshape(-1)

    def finish(self, mean_right: Tensor) -> None:
        """Write the averaged gradient into the bucket, and remember what it leaves out.

        A gradient that is not finite anywhere comes out as nan, on every rank, for whoever guards the
        optimizer. The error is then forgotten, and the factor stays as it was, on every rank.

        Args:
            mean_right: The mean of `right` over the ranks.
        """
        error, factor = self._residual.error, self._residual.factor
        self._hold()
        mean = mean_right.to(error).view(factor.shape)
        self._gradient.copy_((self._basis @ mean.T).view(self._gradient.shape))
        finite = mean.isfinite().all()
        error.addmm_(self._basis, self._own.T, alpha=-1).masked_fill_(~finite, 0)
        length = torch.linalg.vector_norm(mean, dim=0)
        # A column of zeros says nothing about the next gradient, and could never become another.
        factor.copy_(torch.where(finite & (length > 0), mean / length, factor))

    def _hold(self) -> None:
        """Keep what `right` made from being used anew before the stream that reads it here is done.

        On an accelerator the callback that calls `finish` has a stream of its own.
        """
        if self._basis.device.type != "cpu":
            stream = torch.accelerator.current_stream(self._basis.device)
            self._basis.record_stream(stream)
            self._own.record_stream(stream)


class PowerSGD(GradientCompression):
    """PowerSGD with warm start and error feedback; see `LowRankGradient` for the formulas and the paper.

    torch has a hook of this name that keeps its error by bucket. Buckets change after the first step of a
    process, so it cannot continue exactly from a checkpoint. Here it goes by name, and where ranks are
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
        traffic: CommBytes,
    ) -> None:
        super().__init__(process_group, traffic)
        self._start_step = settings.start_step
        self._shapes = matrix_shapes(model, settings)
        if not self._shapes:
            raise ConfigurationError(
                "compression.method",
                settings.method,
                f"makes nothing smaller, because with matrix_rank={settings.matrix_rank} no tensor of the "
                f"model shrinks to 1/{settings.min_compression_rate:g} (min_compression_rate)",
                "lower one of them, or leave it out",
            )
        self._feedback = ErrorFeedback(model, self._shapes)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._step = 0

    def register(self, ddp: DistributedDataParallel) -> None:
        """Become the communication hook of a wrapped model.

        Raises:
            ValueError: If the wrapper is around another model.
        """
        strange = [name for name, parameter in ddp.module.named_parameters() if parameter not in self._names]
        if strange:
            raise ValueError(f"the compression was built for a model without the parameter {strange[0]!r}.")
        super().register(ddp)

    def begin(self, step: int) -> None:
        """Note how many optimizer steps are done; from `start_step` on, gradients are compressed."""
        self._step = step

    def state_components(self) -> Sequence[StateComponent]:
        """The component "compression": every rank owes something else."""
        return (StateComponent(key="compression", stateful=self, sharing_pattern=SharingPattern.PER_RANK),)

    def state_dict(self) -> dict[str, object]:
        """Errors and factors by name of the parameter."""
        return self._feedback.state_dict()

    def load_state_dict(self, state: dict[str, object], /) -> None:
        """Put back what this rank saved."""
        self._feedback.load_state_dict(state)

    def load_resharded(self, states: Sequence[dict[str, object]], /, *, rank: int, world_size: int) -> None:
        """Take up what another number of ranks saved."""
        self._feedback.load_resharded(states, rank=rank, world_size=world_size)

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
                matrices.append(LowRankGradient(own, self._feedback.of(name)))
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


def build_compression(
    settings: CompressionArguments,
    model: nn.Module,
    process_group: ProcessGroup | None,
    traffic: CommBytes,
) -> GradientCompression | None:
    """Build what the settings ask for. Collective.

    Args:
        settings: The method and its options.
        model: The model, unwrapped, on its device.
        process_group: The ranks that average gradients; none for the default group.
        traffic: Counts what this rank hands to collectives for gradients.

    Returns:
        The compression, not yet registered; none for the method "no".

    Raises:
        ConfigurationError: If the method would change nothing for this model, or cannot work with it or with
            the backend.
    """
    if settings.method == "no":
        return None
    _check_dense(settings.method, model)
    if settings.method == "powerSGD":
        return PowerSGD(settings, model, process_group, traffic)
    return RoundedGradients(settings.method, model, process_group, traffic)


def _check_dense(method: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigurationError(
                "compression.method",
                method,
                f"needs dense gradients, but the embedding {name!r} gives sparse ones",
                f"set sparse=False on {name!r}, or leave compression out",
            )
