"""Gradients that travel in 16 bits."""

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from trainer_core import ConfigurationError, Traffic

from .base import GradientCompression

# No `from __future__ import annotations` here: DDP compares the annotations of its hook with types.

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


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
        self, method: str, model: nn.Module, process_group: ProcessGroup | None, traffic: Traffic
    ) -> None:
        super().__init__(process_group, traffic)
        self._dtype = _DTYPES[method]
        self._hook = _HOOKS[method]
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not any(parameter.dtype.itemsize > self._dtype.itemsize for parameter in trainable):
            raise ConfigurationError(
                "compression.method",
                method,
                "makes nothing smaller: no trainable parameter has more than 16 bits",
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
            f"the backend {backend} could not sum {dtype} on {device.type} in a trial: {error}",
            "choose another method, or a backend that can",
        ) from error
