from pathlib import Path

import pytest

from llama_pretrain import PretrainArguments
from llama_pretrain.commands.train_command_line import resolve
from llama_pretrain.mesh import Mesh
from trainer_core import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size", "trainer"),
    [
        ("dp=1", 1, "single"),
        ("dp=2", 2, "ddp"),
        ("shard=4", 4, "fsdp2"),
        ("dp=2, shard=4", 8, "fsdp2"),
        ("pp=2", 2, "pipeline"),
        ("dp=3,pp=2", 6, "pipeline"),
        ("shard=2,pp=4", 8, "pipeline"),
    ],
)
def test_the_trainer_follows_from_the_axes(text: str, size: int, trainer: str) -> None:
    mesh = Mesh.parse(text)
    assert (mesh.size, mesh.trainer) == (size, trainer)
    assert Mesh.parse(str(mesh)) == mesh


def test_the_number_of_copies_follows_too() -> None:
    assert resolve({"mesh": "dp=2,shard=4"}).fsdp2.replicas == 2
    held = resolve({"mesh": "dp=3,pp=2"}).pipeline
    assert (held.replicas, held.shard_replicas) == (3, False)
    shared = resolve({"mesh": "shard=3,pp=2"}).pipeline
    assert (shared.replicas, shared.shard_replicas) == (3, True)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ddp=2", "'ddp' is no axis; there are dp"),
        ("dp=2,dp=2", "gives dp twice"),
        ("dp=0", "dp needs a number of 1 or more"),
        ("dp", "dp needs a number"),
        ("dp=2,shard=2,pp=2", "copies of a pipeline are either held or sharded"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule):
        resolve({"mesh": text})


@pytest.mark.parametrize(
    "given",
    [
        {"mesh": "dp=2", "trainer": "fsdp2"},
        {"mesh": "dp=2,shard=2", "fsdp2.replicas": 4},
        {"mesh": "dp=2,pp=2", "pipeline.shard_replicas": True},
    ],
)
def test_a_setting_that_contradicts_the_mesh_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="contradicts mesh="):
        resolve(given)
    assert resolve({"mesh": "dp=2", "trainer": "ddp"}).trainer == "ddp"


def test_settings_in_python_must_fit_the_mesh() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer='single'.* contradicts mesh='dp=2'"):
        PretrainArguments(mesh="dp=2")
    assert PretrainArguments(mesh="dp=2", trainer="ddp").mesh == "dp=2"


def test_a_mesh_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("mesh: dp=2,shard=4\ntrainer: fsdp2\nfsdp2: {replicas: 2, reshard_after_forward: true}\n")
    assert resolve({"config": str(path)}).fsdp2.replicas == 2
    other = resolve({"config": str(path), "mesh": "shard=2"})
    assert (other.trainer, other.fsdp2.replicas) == ("fsdp2", 1)
    assert resolve({"config": str(path), "mesh": "pp=2"}).trainer == "pipeline"
    assert resolve({"config": str(path), "mesh": "", "trainer": "fsdp2"}).fsdp2.replicas == 1
    with pytest.raises(ConfigurationError, match=r"trainer='ddp'.* contradicts mesh='dp=2,shard=4'"):
        resolve({"config": str(path), "trainer": "ddp"})
