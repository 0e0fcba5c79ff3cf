"""Weights of FP8 layers that travel in float8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule


def gather_float8(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let every unit of a sharded model gather float8, also over gloo, which does not know that dtype.

    Args:
        model: The sharded model.
        mesh: What it is sharded on.
    """
    if dist.get_backend(mesh.get_group(mesh.ndim - 1)) != "gloo":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule) and any(True for _ in module.parameters()):
            module.set_custom_all_gather(_AsBytes())  # type: ignore[arg-type]  # its base is private


def scale_float8(model: nn.Module) -> None:
    """Find the scales of all FP8 weights from the values after an optimizer step; collective.

    Otherwise each layer would ask all ranks for its own scale when it is gathered.

    Args:
        model: The sharded model.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


class _AsBytes:
    """An all-gather of tensors of any dtype, as `fully_shard` takes one."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group=group, async_op=async_op
        )
        return work
