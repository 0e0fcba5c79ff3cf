"""What cannot be sharded is refused on every rank, by the name of the setting; what can be is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

OF_MODEL = {
    "class": ("fsdp2.layer_classes='Blok'", "is not the class of a part", "Linear", "Did you mean 'Block'?"),
    "class of the root": (
        "fsdp2.layer_classes='Tiny'",
        "is not the class of a part of the model that is called",
    ),
    "class of a container": ("fsdp2.layer_classes='ModuleList'", "is not the class of a part of the model"),
    "mixed dtypes": ("layers.1", "several dtypes", "torch.float32", "torch.bfloat16", "freeze"),
    "not contiguous": ("layers.0.mixing.weight", "is not contiguous", ".contiguous()"),
    "no elements": ("layers.0.nothing", "has no elements"),
    "built on meta": ("model_init='embed.weight'", "is a parameter on the meta device"),
    "path": ("transformer_layers_path='layer'", "is not the name of a module", "nearest", "layers"),
    "path to a module": ("transformer_layers_path='embed'", "not a list or dict", "layers"),
    "no blocks": ("transformer_layers_path=None", "fsdp2.shard_transformer_layers", "Flat"),
    "shared weight": (
        "fsdp2.shard_transformer_layers=True",
        "layers.0.mixing.weight and layers.1.mixing.weight are one parameter",
        "fsdp2.shard_transformer_layers=False",
    ),
    "other parameters on each rank": ("model='others.", "has left out in a step in which others used it"),
    "shared layer": ("layers.0.mixing.weight and layers.1.mixing.weight are one parameter",),
    "shared with the rest": ("layers.1.norm.weight and norm.weight are one parameter", "layers.1 is sharded"),
    "scalar": ("layers.0.temperature", "has no dimension", "[1]"),
    "weights of the rank": ("layers.1.mixing.weight", "differs between ranks", "rank 0 has", "rank 1 has"),
    "layers of the rank": ("parameter layers.2.", "differs between ranks", "nothing of that name"),
    "layers of the rank, built": ("parameter layers.2.", "differs between ranks", "nothing of that name"),
    "settings of the rank, in the transform": (
        "fsdp2.reshard_after_forward",
        "rank 0 has True",
        "rank 1 has False",
    ),
    "settings of the rank": ("fsdp2.reshard_after_forward", "rank 0 has True", "rank 1 has False"),
}
OF_MESH = {
    "replicas 3": ("fsdp2.replicas=3", "must divide the world size, 4"),
    "replicas 4": ("fsdp2.replicas=4", "leaves nothing to shard on 4 ranks", "trainer-ddp"),
    "reshard 3": ("fsdp2.reshard_after_forward=3", "must divide the 4 ranks", "Use one of 2"),
    "reshard 3 of 2": ("fsdp2.reshard_after_forward=3", "must divide the 2 ranks"),
}
ACCEPTED = (
    *("no blocks, one piece", "shared weight, one piece", "shared layer, one piece"),
    *("one block twice", "a parameter seldom used"),
)


def check(errors: list[str], words: tuple[str, ...]) -> None:
    for error in errors:
        assert error.startswith("ConfigurationError: "), error
        assert [each for each in words if each not in error] == [], error


@pytest.mark.parametrize("name", OF_MODEL)
def test_model_is_refused_on_every_rank(world: Callable[..., Any], name: str) -> None:
    check(world("few", "2, refused").errors(name), OF_MODEL[name])


@pytest.mark.parametrize("name", OF_MESH)
def test_mesh_is_refused_on_every_rank(world: Callable[..., Any], name: str) -> None:
    check(world("four", "4, refused").errors(name), OF_MESH[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_other_models_have_the_curve_of_one_process(world: Callable[..., Any], name: str) -> None:
    for seen in world("few", "2, refused").seen(name):
        assert seen["losses"] == pytest.approx(seen["alone"], rel=1e-5), seen
        assert len(seen["losses"]) == 3
