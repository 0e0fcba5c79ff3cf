"""Four ranks: meshes of one and two dimensions, by index and by name, and a half of a mesh by itself."""

from __future__ import annotations

from typing import Any

from dispatch_loaders import RANK, Labelled, Numbers, marked_passes, open_group, tell
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dataloader_dispatch.dispatch.dispatcher import DataloaderDispatcher

open_group()
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
line = init_device_mesh("cpu", (4,))
cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "dp", "shard"))


def received(mesh: DeviceMesh, first: bool, **options: Any) -> list[list[int]]:
    """What comes in a pass that is broken off, in a whole one, and in one after a return to a position."""
    loader = DataloaderDispatcher(Numbers(10) if first else None, mesh, "cpu", timeout_seconds=60, **options)
    begun = iter(loader)
    passes = [[int(next(begun)["x"]) for _ in range(2)]]
    state = loader.state_dict()
    passes.append([int(batch["x"]) for batch in loader])
    loader.load_state_dict(state)
    passes.append([len(loader), *(int(batch["x"]) for batch in loader)])
    loader.close()
    return passes


def few(mesh: DeviceMesh, length: int) -> list[list[Any]]:
    """What comes of fewer batches than ranks."""
    batches = Labelled(length) if RANK == 0 else None
    loader = DataloaderDispatcher(batches, mesh, "cpu", uneven="pad", timeout_seconds=60)
    passes = marked_passes(loader)
    loader.close()
    return passes


def a_dummy(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of -1."""
    return {"x": batch["x"] * 0 - 1}


notes: dict[str, Any] = {
    "line": received(line, RANK == 0, make_dummy=a_dummy, uneven="pad"),
    "by name": received(square, RANK == 0, dp_mesh_dim="dp"),
    "by index": received(square, RANK == 0, dp_mesh_dim=1),
    "both": received(square, RANK == 0, dp_mesh_dim=("dp", "tp"), uneven="pad", make_dummy=a_dummy),
    "two of three": received(cube, RANK == 0, dp_mesh_dim=("dp", "shard")),
    "same": received(square, RANK == 0, dp_mesh_dim=None),
    "few": [few(line, 1), few(line, 0), few(square, 1)],
    # Two jobs side by side, each with a first rank of its own.
    "rows": received(square["tp"], RANK in (0, 2), dp_mesh_dim="tp"),
}
tell(notes)
