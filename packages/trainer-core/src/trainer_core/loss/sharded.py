"""Weights that are spread over ranks (DTensor), made whole for a product that needs all of them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


def whole(weight: Tensor, same_data: Collection[str] | None = ()) -> Tensor:
    """Gather a sharded weight; its gradient is reduced back to the shards.

    Args:
        weight: A tensor, which is returned as it is, or a DTensor of any placement, uneven shards included.
        same_data: Names of the mesh dimensions whose ranks work on the same data (tensor parallel): their
            gradients are equal, and are not added up. Over all others they are. None: all dimensions.

    Returns:
        The whole weight on this rank. The gradient of a DTensor is a DTensor of the same placement: the SUM
        over the ranks, not their mean.
    """
    if type(weight) in (Tensor, nn.Parameter):
        return weight
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    gradients = [Replicate() if same_data is None or name in same_data else Partial() for name in names]
    gathered: Tensor = weight.full_tensor(grad_placements=gradients)
    return gathered


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
