"""Which rank of a mesh gets which batch of a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dataloader_dispatch.errors import DataError

DataDimension = int | str | tuple[int | str, ...] | None
"""Index or name of the data-parallel dimension of a mesh; several of them, outermost first; or None."""


@dataclass(frozen=True)
class Placement:
    """The ranks of a mesh and the batch that each gets.

    Attributes:
        ranks: Global ranks; the first is the root, which loads.
        shares: For each of ``ranks``, the position of its batch in a round. Ranks that differ only along
            other dimensions of the mesh have the same.
        width: Number of batches in a round: the product of the data-parallel dimensions, 1 without one.
    """

    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    width: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dp_mesh_dim: DataDimension) -> Placement:
        """The placement on a mesh; that of this process alone without one.

        Raises:
            DataError: The mesh has no such dimension.
        """
        if mesh is None:
            here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            return cls((here,), (0,), 1)
        ranks, strides, width = mesh.mesh, [], 1
        for dimension in reversed(_dimensions(mesh, dp_mesh_dim)):
            strides.append((ranks[(0,) * (dimension + 1)].numel(), ranks.shape[dimension], width))
            width *= ranks.shape[dimension]
        shares = tuple(
            sum(position // below % size * weight for below, size, weight in strides)
            for position in range(ranks.numel())
        )
        return cls(tuple(ranks.flatten().tolist()), shares, width)


def _dimensions(mesh: DeviceMesh, dp_mesh_dim: DataDimension) -> list[int]:
    """Indices of the data-parallel dimensions, outermost first."""
    if dp_mesh_dim is None:
        return []
    given = dp_mesh_dim if isinstance(dp_mesh_dim, tuple) else (dp_mesh_dim,)
    found = [_dimension(mesh, each) for each in given]
    if sorted(set(found)) != found:
        raise DataError(
            f"dp_mesh_dim={dp_mesh_dim!r} must name each dimension once, in the order that the mesh has them"
        )
    return found


def _dimension(mesh: DeviceMesh, dp_mesh_dim: int | str) -> int:
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
