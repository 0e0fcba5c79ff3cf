"""The setting `mesh`: how many processes share the work along which dimension, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping

from dist_env import DistributedEnvironmentError, ParallelLayout
from trainer_core import ConfigurationError

MOVED: Mapping[str, object] = {
    "fsdp2.replicas": 1,
    "pipeline.replicas": 1,
    "pipeline.shard_replicas": False,
}
"""Deprecated settings that say a part of what mesh says, and their defaults."""


def parse_mesh(text: str) -> ParallelLayout:
    """Read a text such as "dp=2,shard=4"; an empty one is one process.

    Raises:
        ConfigurationError: If it is not a layout.
    """
    if not text:
        return ParallelLayout()
    try:
        return ParallelLayout.parse(text)
    except DistributedEnvironmentError as error:
        raise ConfigurationError("mesh", text, f"cannot be used: {error}", "change the mesh") from error


def trainer_for(layout: ParallelLayout) -> str:
    """The trainer that uses such a layout."""
    if layout.pipeline > 1:
        return "pipeline"
    if layout.shards_weights:
        return "fsdp2"
    return "ddp" if layout.replicate * layout.tensor > 1 else "single"


def told_trainer(trainer: str, mesh: ParallelLayout) -> str:
    """How the devices of a layout are used, for the user to read."""
    ways = [f"{name} parallel" for name in ("context", "tensor", "expert") if getattr(mesh, name) > 1]
    if ways and trainer == "ddp" and mesh.replicate == 1:
        return ways[0]
    return " and ".join([trainer, *ways])


def check_mesh(text: str, trainer: str) -> None:
    """Make sure that a trainer is the one that follows from a mesh.

    Args:
        text: The mesh; empty for none.
        trainer: Name of the trainer.

    Raises:
        ConfigurationError: If it is not.
    """
    if text and trainer != (follows := trainer_for(parse_mesh(text))):
        raise ConfigurationError(
            "trainer", trainer, f"contradicts mesh={text!r}", f"set trainer={follows!r}, or leave out mesh"
        )


def names_said_by_mesh(before: Mapping[str, object], now: Mapping[str, object]) -> set[str]:
    """Settings whose change is none of the run: mesh says what the deprecated ones have said.

    Args:
        before: Settings of the last start, those of groups as `group.name`.
        now: Those of this one.
    """
    meshes = before.get("mesh"), now.get("mesh")
    if not any(meshes):
        return set()
    moved = any(before.get(name) != now.get(name) for name in MOVED)
    as_before = before.get("trainer") == now.get("trainer") and _replicas(before) == _replicas(now)
    return {*MOVED, "mesh"} if moved and as_before and not all(meshes) else set(MOVED)


def _replicas(settings: Mapping[str, object]) -> dict[str, object]:
    """The deprecated settings of a run, as its mesh has them if it has one."""
    text = settings.get("mesh")
    said = said_before(parse_mesh(text)) if isinstance(text, str) and text else settings
    return {name: said.get(name, default) for name, default in MOVED.items()}


def said_before(layout: ParallelLayout) -> dict[str, object]:
    """What the deprecated settings of its trainer say of a layout."""
    trainer = trainer_for(layout)
    if trainer == "fsdp2":
        return {"fsdp2.replicas": layout.replicate}
    if trainer == "pipeline":
        return {"pipeline.replicas": layout.data_count, "pipeline.shard_replicas": layout.shard > 1}
    return {}
