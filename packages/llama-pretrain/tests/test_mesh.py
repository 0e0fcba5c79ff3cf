from pathlib import Path

import pytest
import yaml

from llama_pretrain import PretrainArguments
from llama_pretrain.mesh import names_said_by_mesh, parse_mesh, trainer_for
from llama_pretrain.run_directory import RunDirectory
from llama_pretrain.settings import resolve
from trainer_core import ConfigurationError


@pytest.mark.parametrize(
    ("text", "size", "trainer"),
    [
        ("", 1, "single"),
        ("dp=1", 1, "single"),
        ("dp=2", 2, "ddp"),
        ("replicate=2", 2, "ddp"),
        ("shard=4", 4, "fsdp2"),
        ("dp=2, shard=4", 8, "fsdp2"),
        ("pp=2", 2, "pipeline"),
        ("dp=3,pp=2", 6, "pipeline"),
        ("shard=2,pipeline=4", 8, "pipeline"),
        ("dp=2,shard=2,pp=2", 8, "pipeline"),
        ("tp=2", 2, "ddp"),
        ("shard=2,tp=2", 4, "fsdp2"),
        ("pp=2,tp=2", 4, "pipeline"),
        ("shard=2,ep=2", 2, "fsdp2"),
        ("tp=2,ep=2", 2, "ddp"),
        ("tp=4,ep=2", 4, "fsdp2"),
    ],
)
def test_the_trainer_follows_from_the_dimensions(text: str, size: int, trainer: str) -> None:
    layout = parse_mesh(text)
    assert (layout.world_size, trainer_for(layout)) == (size, trainer)
    assert parse_mesh(str(layout)) == layout
    args = resolve({"mesh": text})
    assert (args.trainer, args.mesh, args.fsdp2.replicas, args.pipeline.replicas) == (trainer, text, 1, 1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("ddp=2", "'ddp' is not a dimension. Did you mean dp"),
        ("dp=2,dp=2", "replicate is given twice"),
        ("dp=0", "replicate='0' is not a possible size"),
        ("dp", "is not NAME=SIZE"),
        ("shard=auto", "shard=auto needs the world size"),
        ("ep=2,dp=2", "expert=2 does not divide shard x context x tensor = 1"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ConfigurationError, match=rule) as refused:
        resolve({"mesh": text})
    assert refused.value.setting == "mesh"


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


def test_stages_that_are_sharded_take_the_settings_of_sharding() -> None:
    args = resolve({"mesh": "pp=2,shard=2", "fsdp2.param_dtype": "bfloat16"})
    assert (args.trainer, args.fsdp2.param_dtype) == ("pipeline", "bfloat16")
    with pytest.raises(ConfigurationError, match=r"fsdp2\.param_dtype='bfloat16' has no effect with"):
        resolve({"mesh": "pp=2,dp=2", "fsdp2.param_dtype": "bfloat16"})
    with pytest.raises(ConfigurationError, match=r"fsdp2\.replicas=2 has no effect in a pipeline"):
        resolve({"mesh": "pp=2,shard=2", "fsdp2.replicas": 2})


def test_a_mesh_on_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("mesh: dp=2,shard=4\ntrainer: fsdp2\nfsdp2: {replicas: 2, reshard_after_forward: true}\n")
    assert resolve({"config": str(path)}).mesh == "dp=2,shard=4"
    other = resolve({"config": str(path), "mesh": "shard=2"})
    assert (other.trainer, other.mesh) == ("fsdp2", "shard=2")
    assert resolve({"config": str(path), "mesh": "pp=2"}).trainer == "pipeline"
    assert resolve({"config": str(path), "mesh": "", "trainer": "fsdp2"}).fsdp2.replicas == 1
    with pytest.raises(ConfigurationError, match=r"trainer='ddp'.* contradicts mesh='dp=2,shard=4'"):
        resolve({"config": str(path), "trainer": "ddp"})


OLD = [
    ({"mesh": "dp=2,shard=2", "trainer": "fsdp2", "fsdp2": {"replicas": 2}}, "dp=2,shard=2"),
    ({"mesh": "", "trainer": "fsdp2", "fsdp2": {"replicas": 2}}, "dp=2,shard=2"),
    ({"mesh": "pp=2,dp=2", "trainer": "pipeline", "pipeline": {"replicas": 2}}, "pp=2,dp=2"),
    ({"trainer": "pipeline", "pipeline": {"replicas": 2, "shard_replicas": True}}, "shard=2,pp=2"),
]


@pytest.mark.parametrize(("old", "mesh"), OLD)
def test_what_moved_to_the_mesh_is_no_change(old: dict[str, object], mesh: str, tmp_path: Path) -> None:
    directory, subject = RunDirectory(tmp_path), {"data": "x"}
    now = resolve({"mesh": mesh, "output_dir": str(tmp_path)})
    directory.begin(now, subject)
    (tmp_path / "checkpoint-5").mkdir()
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    for name, value in old.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert directory.arguments().mesh == old.get("mesh", mesh)
    assert directory.begin(now, subject) == {}


def test_another_layout_is_a_change_of_the_mesh_alone() -> None:
    moved = {"fsdp2.replicas", "pipeline.replicas", "pipeline.shard_replicas"}
    before = {"trainer": "fsdp2", "mesh": "", "fsdp2.replicas": 2}
    assert names_said_by_mesh(before, {"trainer": "fsdp2", "mesh": "dp=4,shard=2"}) == moved
    assert names_said_by_mesh({**before, "mesh": "dp=2,shard=2"}, {"trainer": "ddp", "mesh": "dp=4"}) == moved
    assert names_said_by_mesh(before, {"trainer": "fsdp2", "mesh": "", "fsdp2.replicas": 4}) == set()
