"""The one device mesh of a job, and the views of it."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dist_env.errors import DistributedEnvironmentError
from dist_env.interface import FAKE_BACKEND
from dist_env.layout import EXPERT_BLOCK, MESH_DIMENSIONS, VIEWS, ParallelLayout


class Meshes:
    """One device mesh for a layout, and one-dimensional views of it that share its root.

    All ranks make it together, for it makes process groups. Ranks of a view are those of
    `layout.group(view, rank)`, in the same order. A view that spans only one dimension of more than one
    rank is that dimension's mesh, so that no communicator is made twice: rely on its ranks, not on its
    dimension's name.

    Args:
        layout: The sizes; their product is the world size.
        device_type: Where tensors live, such as `env.device_type`.

    Attributes:
        layout: The sizes.
        mesh: The whole, of shape [pipeline, replicate, shard, context, tensor].
        data: Ranks with different batches: replicate x shard.
        fsdp: Ranks that share out weights: shard x context.
        loss: Ranks whose token losses add up: replicate x shard x context.
        replicate: Ranks that hold equal weights.
        tensor: Ranks that share out each matrix.
        context: Ranks that share out each sequence.
        pipeline: Ranks of the stages, in their order.
        hsdp: The ranks of `fsdp` with the replicas: [replicate, fsdp]; None if `layout.replicate` is 1.
        expert: Ranks that share out the experts; None if `layout.expert` is 1.
        expert_fsdp: Ranks that share out the weights of the same experts; None if `layout.expert` is 1.
        expert_hsdp: The same with the replicas: [replicate, expert_fsdp]; None if either is 1.

    Raises:
        DistributedEnvironmentError: The process group is missing, or has another number of ranks. It is
            raised before any communication.
    """

    def __init__(self, layout: ParallelLayout, device_type: str = "cpu") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise DistributedEnvironmentError(
                "Meshes need a process group, and there is none. Open a DistributedEnvironment first."
            )
        if layout.world_size != dist.get_world_size():
            raise DistributedEnvironmentError(
                f"The layout {layout} needs {layout.world_size} ranks, but {dist.get_world_size()} were "
                "started. Start as many, or change the layout."
            )
        self.layout = layout
        self.mesh: DeviceMesh = _make_mesh(layout, device_type)
        self.data: DeviceMesh = self._view("data", VIEWS["data"])
        self.fsdp: DeviceMesh = self._view("fsdp", VIEWS["fsdp"])
        self.loss: DeviceMesh = self._view("loss", VIEWS["loss"])
        self.replicate: DeviceMesh = self.mesh["replicate"]
        self.tensor: DeviceMesh = self.mesh["tensor"]
        self.context: DeviceMesh = self.mesh["context"]
        self.pipeline: DeviceMesh = self.mesh["pipeline"]
        self.hsdp: DeviceMesh | None = self._replicas() if layout.replicate > 1 else None
        self.expert: DeviceMesh | None = None
        self.expert_fsdp: DeviceMesh | None = None
        self.expert_hsdp: DeviceMesh | None = None
        if layout.expert > 1:
            split = self._split(
                ("replicate", *EXPERT_BLOCK),
                {
                    "expert_replicate": layout.replicate,
                    "expert_fsdp": layout.expert_fsdp,
                    "expert": layout.expert,
                },
            )
            self.expert_fsdp, self.expert = split["expert_fsdp"], split["expert"]
            if layout.replicate > 1:
                self.expert_hsdp = split["expert_replicate", "expert_fsdp"]

    def _view(self, name: str, dimensions: tuple[str, ...]) -> DeviceMesh:
        wide = tuple(each for each in dimensions if getattr(self.layout, each) > 1)
        if len(wide) < 2:
            return self.mesh[wide[0] if wide else dimensions[-1]]
        # Private in torch 2.11 to 2.13: `DeviceMesh._flatten` makes one dimension of several. The public
        # `DeviceMesh.from_group` would give a mesh of another root, and FSDP refuses to combine such a mesh
        # with the one of tensor parallelism. If it changes, test_meshes.py fails.
        return self.mesh[wide]._flatten(name)

    def _replicas(self) -> DeviceMesh:
        layout = self.layout
        if layout.context == 1 or layout.shard == 1:
            return self.mesh["replicate", "shard" if layout.context == 1 else "context"]
        sizes = {"hsdp_replicate": layout.replicate, "hsdp_fsdp": layout.shard * layout.context}
        return self._split(("replicate", *VIEWS["fsdp"]), sizes)["hsdp_replicate", "hsdp_fsdp"]

    def _split(self, dimensions: tuple[str, ...], sizes: dict[str, int]) -> DeviceMesh:
        """Dimensions of the whole as others of the same product."""
        # Private in torch 2.11 to 2.13, and without a public equal: `DeviceMesh._unflatten` splits a
        # dimension and keeps the root. Checked by test_meshes.py.
        block = self._view("_and_".join(dimensions), dimensions)
        return block._unflatten(0, tuple(sizes.values()), tuple(sizes))

    def __repr__(self) -> str:
        return f"Meshes({str(self.layout)!r})"


def _make_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """The whole mesh; dimensions of one rank get groups without connections, memory or threads.

    A group of gloo has three threads, one of which wakes a hundred times a second, and one of NCCL takes
    memory of the device. torch's fake group of one rank gives what that rank gave, as a real one does. A job
    of one rank keeps real groups, which cost little there.
    """

    def make(**options: Any) -> DeviceMesh:
        return init_device_mesh(device_type, layout.mesh_shape, mesh_dim_names=MESH_DIMENSIONS, **options)

    sizes = dict(zip(MESH_DIMENSIONS, layout.mesh_shape, strict=True))
    alone = [name for name, size in sizes.items() if size == 1]
    if layout.world_size == 1 or not alone:
        return make()
    # Registers the backend; torch keeps it among its tools for tests. Checked by test_meshes.py.
    import torch.testing._internal.distributed.fake_pg

    mesh = make(backend_override=dict.fromkeys(alone, FAKE_BACKEND))
    # Older releases leave the result of this collective as it was.
    scattered = torch.zeros(1)
    dist.reduce_scatter(scattered, [torch.ones(1)], group=mesh.get_group(alone[0]))
    return mesh if scattered.item() == 1.0 else make()
