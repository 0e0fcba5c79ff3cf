"""The command `plan`: its figures, its recommendation, and that what it tells to type can be typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llama_pretrain import Llama, LlamaConfig, PretrainArguments
from llama_pretrain.cli import main
from llama_pretrain.commands.arguments import plan_arguments, plan_parser
from llama_pretrain.commands.plan import Gpus, Planned, overview
from llama_pretrain.settings import resolve, train_parser
from trainer_fsdp2 import Recommendation, recommend

Ask = Callable[..., tuple[str, Any]]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of 4 wide layers, about 0.6 GiB of weights."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    folder = tmp_path_factory.mktemp("shape")
    config.save(folder)
    return folder


@pytest.fixture
def planned(
    shape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, dict[str, object]]]:
    """`planned("--gpus", "16")`: what is printed and what is written."""

    def run(*words: str) -> tuple[str, Any]:
        file = tmp_path / "plan.json"
        common = ["--model", str(shape), "--sequence-length", "2048", "--json", str(file)]
        assert main(["plan", *common, *words]) == 0
        (values,) = json.loads(file.read_text())
        return capsys.readouterr().out, values

    return run


def _typed(command: str) -> PretrainArguments:
    """The settings that a command line of `train` makes."""
    words = command.split()
    return resolve(train_parser().parse_args_strictly(words[words.index("train") + 1 :]))


def test_state_of_a_model_is_counted_exactly(planned: Ask, shape: Path) -> None:
    _, values = planned("--gpus", "4", "--gpu-memory", "80")
    model = Llama(LlamaConfig.load(shape))
    parameters = list(model.parameters())
    # All rows are multiples of 4: a quarter of the weights, as many gradients, two moments and step counts.
    quarter = sum(p.numel() for p in parameters)
    said = values["as_given"]
    assert said["parameter_count"] == quarter
    assert (said["parameters"], said["gradients"]) == (quarter, quarter)
    assert said["optimizer"] == 2 * quarter + 4 * len(parameters)


def test_large_gpus_take_whole_copies(planned: Ask) -> None:
    text, values = planned("--gpus", "8")
    command = values["recommended"]["command"]
    assert command in text
    assert "DDP, a copy on each GPU" in text
    assert command.startswith(
        "torchrun --standalone --nproc-per-node 8 -m llama_pretrain train --trainer ddp"
    )
    args = _typed(command)
    assert (args.trainer, args.mixed_precision, args.per_device_train_batch_size) == ("ddp", "bf16", 2)


@pytest.mark.full
def test_small_gpus_take_everything_that_saves_memory(planned: Ask) -> None:
    words = ("--gpus", "16", "--per-device-train-batch-size", "8", "--fused-loss", "chunked")
    text, values = planned(*words, "--gpu-memory", "3.3", "--no-fsdp2.shard-transformer-layers")
    found = values["recommended"]
    assert found["command"].startswith("torchrun --nnodes 2 ")
    layouts = [each["layout"] for each in found["rejected"]]
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  no ")] == ["no"] * len(
        layouts
    )
    args = _typed(found["command"])
    assert args.trainer == "fsdp2"
    assert args.activation_checkpointing == "full"
    assert args.fused_loss == "chunked"
    assert args.fsdp2.param_dtype == "bfloat16"
    assert not args.fsdp2.shard_transformer_layers
    assert args.per_device_train_batch_size == found["plan"]["batch_size"] < 8
    assert found["plan"]["total"] <= 3.3 * 2**30


def test_share_of_checkpointed_blocks_survives_the_command_line(planned: Ask) -> None:
    text, values = planned("--gpus", "8", "--per-device-train-batch-size", "8", "--gpu-memory", "6.2")
    args = _typed(values["recommended"]["command"])
    assert args.activation_checkpointing == "share"
    assert "of the blocks checkpointed: needs" in text
    assert args.sequence_length == 2048


@pytest.mark.full
def test_what_does_not_fit_has_no_command(planned: Ask) -> None:
    text, values = planned("--gpus", "8", "--gpu-memory", "1.5")
    assert values["recommended"]["command"] is None
    assert "does not fit on any number of GPUs" in text
    assert "torchrun" not in text


@pytest.mark.full
def test_several_models_make_a_table(shape: Path) -> None:
    args = plan_arguments({"per_device_train_batch_size": 8})
    config = LlamaConfig.load(shape)
    gpus = Gpus(count=8, per_node=8, memory=4, sequence_length=1024)

    def ask(memory: float) -> Recommendation:
        model = partial(Llama, config)
        return recommend(model, args, world_size=8, gpu_memory=memory, sequence_length=1024)

    lines = overview([Planned("one", None, ask(80)), Planned("two", None, ask(1.75))], gpus).splitlines()
    assert lines[0] == "8 GPUs of 4 GiB, rows of 1024 tokens; GiB per GPU:"
    assert lines[1].split()[:3] == ["model", "layout", "batch"]
    assert lines[2].startswith("one  ")
    assert lines[3].startswith("two  ")
    assert len({len(line) for line in lines[1:4]}) == 1
    assert sum(line.startswith("torchrun") for line in lines) == 2
    assert any(line.startswith("two: ") and "of the host per GPU" in line for line in lines)


def test_layers_compute_in_bf16_unless_told_otherwise() -> None:
    assert plan_arguments({}).fsdp2.param_dtype == "bfloat16"
    assert plan_arguments({"mesh": "dp=2,shard=4"}).fsdp2.param_dtype == "bfloat16"
    assert plan_arguments({"mesh": "dp=2,shard=8"}).gpus == 16
    assert plan_arguments({"fsdp2.param_dtype": None}).fsdp2.param_dtype is None
    assert plan_arguments({"mixed_precision": "bf16"}).fsdp2.param_dtype is None


def test_help_names_the_settings_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_parser().parse_args_strictly(["--help"])
    text = capsys.readouterr().out
    for option in ("--gpu-memory", "--mesh", "--activation-checkpointing", "--fused-loss"):
        assert option in text
    assert "--learning-rate" not in text


def test_tensor_parallel_is_planned_and_kept_in_each_layout(tmp_path: Path) -> None:
    words = ["plan", "--model", "tiny", "--sequence-length", "64", "--mesh", "shard=2,tp=2"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    (figures,) = json.loads((tmp_path / "plan.json").read_text())
    given, found = figures["as_given"], figures["recommended"]
    assert (given["layout"], found["plan"]["layout"]) == ("shard=2,tp=2", "dp=2,tp=2")
    assert given["parameters"] < 0.26 * 4 * given["parameter_count"]
    assert found["plan"]["parameters"] < 0.51 * 4 * given["parameter_count"]
    assert "--mesh dp=2,tp=2 " in found["command"]


SHORT = ("--model", "tiny", "--sequence-length", "64")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "8b"], "model='8b'"),
        (["--model", "7b", "--sequence-length", "8192"], "sequence_length=8192"),
        (["--model", "tiny", "--sequence-length", "64", "--gpus", "12"], "world_size=12"),
        (["--model", "tiny", "--sequence-length", "64", "--gpu-memory", "0"], "gpu_memory=0"),
        (["--model", "tiny", "--sequence-length", "64", "--fsdp2.replicas", "3"], "fsdp2.replicas=3"),
        (["--model", "tiny", "--sequence-length", "64", "--mesh", "dp=3", "--gpus", "8"], "mesh='dp=3'"),
        (["--model", "tiny", "--mesh", "shard=4,tp=2", "--gpus", "16"], "is for 8 GPUs, but gpus=16"),
        (["--model", "tiny", "--sequence-length", "64", "--mesh", "pp=2"], "other than dp, shard and tp"),
        (["--model", "tiny", "--sequence-length", "64", "--mesh", "tp=16"], "mesh='tp=16' cannot divide"),
        ([*SHORT, "--mesh", "tp=4", "--gpus-per-node", "2"], "tensor=4 does not divide the 2"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_one_process_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert main(["plan", "--model", "tiny"]) == 2
    assert "plan runs in one" in capsys.readouterr().err
