"""Which rank of a mesh gets which batch of a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataloader_dispatch.errors import DataError


@dataclass(frozen=True)
class Placement:
    """The ranks of a mesh and the batch that each gets.

    Attributes:
        ranks: Global ranks; the first is the root, which loads.
        shares: For each of ``ranks``, the position of its batch in a round. Ranks that differ only along
            other dimensions of the mesh have the same.
        width: Number of batches in a round: the size of the data-parallel dimension, 1 without one.
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp_mesh_dim: int | str | None) -> Placement:
        """The placement on a mesh; that of this process alone without one.

        Raises:
            DataError: The mesh has no such dimension.
        """
        if mesh is None:
            here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            return cls((here,), (0,), 1)
        dimension = _dimension(mesh, dp_mesh_dim)
        ranks = mesh.mesh
        if dimension is None:
            return cls(tuple(ranks.flatten().tolist()), (0,) * ranks.numel(), 1)
        width = ranks.shape[dimension]
        below = ranks[(0,) * (dimension + 1)].numel()
        shares = tuple(position // below % width for position in range(ranks.numel()))
        return cls(tuple(ranks.flatten().tolist()), shares, width)


def _dimension(mesh: DeviceMesh, dp_mesh_dim: int | str | None) -> int | None:
    if dp_mesh_dim is None:
        return None
    names = mesh.mesh_dim_names or ()
    if isinstance(dp_mesh_dim, str) and dp_mesh_dim in names:
        return names.index(dp_mesh_dim)
    if type(dp_mesh_dim) is int and 0 <= dp_mesh_dim < mesh.ndim:
        return dp_mesh_dim
    known = f", called {', '.join(map(repr, names))}" if names else ", which have no names"
    raise DataError(
        f"dp_mesh_dim={dp_mesh_dim!r} is no dimension of the mesh; it has the dimensions 0 to {mesh.ndim - 1}"
        f"{known}. Give one of these, or None to send every rank the same batches"
    )
