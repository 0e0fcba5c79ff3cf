"""Recipes: files that stand alone, run as they say, and have the figures of the reports that they name."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from llama_pretrain import YarnScaling, load_tokenizer, preset
from llama_pretrain.cli import main
from llama_pretrain.commands.recipes import tokens_per_step
from llama_pretrain.config_files import load_config, purpose, recipe_names, recipe_text
from llama_pretrain.experiment import model_config
from llama_pretrain.mesh import parse_mesh
from llama_pretrain.settings import resolve
from trainer_core import ConfigurationError

LARGE = [name for name in recipe_names() if re.fullmatch(r"\d+b-\d+gpus", name)]
TENSOR = [name for name in recipe_names() if name.endswith("-tensor")]
OTHER_STEPS = ("tiny-experts", "tiny-muon")
SMALL = [name for name in recipe_names() if name.startswith("tiny") and name not in OTHER_STEPS]
LONG = "7b-64gpus-long"
EXPERTS = ("tiny-experts", "mixtral-8x7b-64gpus")


def test_the_installed_package_has_them() -> None:
    entries = {entry.name for entry in (files("llama_pretrain") / "recipes").iterdir()}
    assert {f"{name}.yaml" for name in recipe_names()} <= entries
    assert {"tiny-cpu", "tiny-2-processes", "tiny-pipeline", "7b-128gpus", "70b-464gpus"} <= set(
        recipe_names()
    )
    assert sorted(recipe_names()) == sorted([*LARGE, *TENSOR, *SMALL, LONG, *EXPERTS, "tiny-muon"])
    assert {"mixtral-8x7b-64gpus", LONG} & set(recipe_names()[: len(SMALL) + 1]) == set(), (
        "the small ones first"
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_a_recipe_with_experts_divides_them(name: str) -> None:
    args = resolve({"config": name})
    mesh = parse_mesh(args.mesh)
    assert mesh.expert == min(8, mesh.world_size), "within a node"
    assert preset(args.model).experts(preset(args.model).num_hidden_layers - 1) is not None
    assert tokens_per_step(args) == (1024 if name.startswith("tiny") else 2**20)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_stands_alone(name: str) -> None:
    args = resolve({"config": name})  # every rule of every setting is checked
    assert args.output_dir == f"runs/{name}"
    assert 10 < len(purpose(name)) < 90
    assert all(len(line) <= 110 for line in recipe_text(name).splitlines())


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_of_the_reports_has_their_settings(name: str) -> None:
    args, text = resolve({"config": name}), recipe_text(name)
    model, gpus = re.fullmatch(r"(\d+b)-(\d+)gpus", name).groups()  # type: ignore[union-attr]
    mesh = parse_mesh(args.mesh)
    assert (args.model, mesh.world_size) == (model, int(gpus))
    assert (args.sequence_length, args.vocab_size) == (4096, 32000)
    # A copy on each node up to 13B (HSDP), one copy over all beyond (FSDP).
    assert mesh.shard == (8 if model in ("7b", "13b") else int(gpus))
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay) == (0.9, 0.95, 0.1)
    assert args.lr_scheduler_kwargs["min_lr"] == pytest.approx(args.learning_rate / 10)
    assert args.fsdp2.param_dtype == "bfloat16"
    checkpointing = {"7b": "no", "13b": "share", "34b": "full", "70b": "full"}
    assert args.activation_checkpointing == checkpointing[model]
    assert {"Source:", "Measured there:", "Chosen here:"} <= set(re.findall(r"^# (\w[\w ]*:)", text, re.M))


@pytest.mark.parametrize("name", TENSOR)
def test_a_recipe_that_divides_tensors_differs_in_the_layout_alone(name: str) -> None:
    args, other = resolve({"config": name}), resolve({"config": name.removesuffix("-tensor")})
    mesh = parse_mesh(args.mesh)
    assert mesh.world_size == parse_mesh(other.mesh).world_size
    assert 8 % mesh.tensor == 0, "within a node"
    assert tokens_per_step(args) == tokens_per_step(other)
    of_the_layout = ("mesh", "gradient_accumulation_steps", "output_dir", "fused_loss")
    same = {each.name for each in fields(args)} - {*of_the_layout}
    assert {key for key in same if getattr(args, key) != getattr(other, key)} == set()


def test_the_recipe_of_long_rows_stretches_the_model_that_it_is_given(tmp_path: Path) -> None:
    args = resolve({"config": LONG})
    mesh = parse_mesh(args.mesh)
    assert (mesh.world_size, mesh.context) == (64, 8)
    assert tokens_per_step(args) == 16 * 32768
    assert args.max_steps * 16 == 400 * 64  # rows of the run, as in the paper
    assert (args.learning_rate, args.weight_decay, args.warmup_steps) == (2e-5, 0, 20)
    assert args.document_attention
    tokenizer = load_tokenizer("byte")
    assert model_config(args, tokenizer).rope_scaling == YarnScaling(
        factor=8.0, original_max_position_embeddings=4096
    )
    preset("7b", max_position_embeddings=8192).save(tmp_path)
    given = model_config(resolve({"config": LONG, "model": str(tmp_path)}), tokenizer)
    assert given.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=8192)
    assert given.max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("name", "tokens", "budget"),
    [
        ("7b-128gpus", 1_048_576, 2e12),  # "1M tokens per batch on 128 GPUs", 2T tokens
        ("7b-448gpus", 3_670_016, 4e12),  # "448 H100, batch 3.7M tokens, 4T tokens"
        ("7b-512gpus", 4_194_304, 2e12),
        ("7b-8gpus", 1_048_576, 2e10),
        ("70b-96gpus", 786_432, 2e12),  # 2 rows of 4096 tokens per GPU
    ],
)
def test_tokens_of_a_step_and_of_the_run(name: str, tokens: int, budget: float) -> None:
    args = resolve({"config": name})
    assert tokens_per_step(args) == tokens
    assert args.max_steps * tokens == pytest.approx(budget, rel=1e-4)


def test_all_small_recipes_make_the_same_steps() -> None:
    same = ("learning_rate", "max_steps", "seed", "warmup_steps", "model", "sequence_length")
    seen = {name: resolve({"config": name}) for name in SMALL}
    assert {tokens_per_step(args) for args in seen.values()} == {1024}
    assert len({tuple(getattr(args, key) for key in same) for args in seen.values()}) == 1
    assert {args.trainer for args in seen.values()} == {"single", "ddp", "fsdp2", "pipeline"}


def test_muon_makes_the_default_run() -> None:
    args, default = resolve({"config": "tiny-muon"}), resolve({})
    differ = {each.name for each in fields(args) if getattr(args, each.name) != getattr(default, each.name)}
    lengths = {"max_steps", "eval_steps", "save_steps"}
    assert differ == lengths | {"optim", "optim_kwargs", "learning_rate", "mesh", "output_dir"}
    assert args.max_steps < default.max_steps


def test_an_option_beats_a_recipe() -> None:
    args = resolve({"config": "7b-128gpus", "max_steps": 10, "mesh": "shard=16"})
    assert (args.max_steps, args.trainer, args.mesh) == (10, "fsdp2", "shard=16")
    assert args.learning_rate == 3e-4


def test_a_wrong_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match=r"config='7b-128gpu' .*Did you mean '7b-128gpus'\?"):
        load_config("7b-128gpu")
    with pytest.raises(ConfigurationError, match=r"config='nothing/like.yaml'.*cannot be read"):
        load_config("nothing/like.yaml")


def test_a_file_goes_before_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("max_steps: 3\n")
    assert load_config(str(tmp_path / "mine.yaml")) == {"max_steps": 3}
    (tmp_path / "tiny-cpu").mkdir()  # an output directory, perhaps
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny-cpu")["max_steps"] == 300


def test_they_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("7b-448gpus")]
    assert row.split()[1:5] == ["7b", "dp=56,shard=8", "448", "3,670,016"]
    assert row.endswith("7B on 448 H100-80GB: the run of 4T tokens")
    assert main(["recipes", "tiny-pipeline"]) == 0
    assert capsys.readouterr().out == recipe_text("tiny-pipeline")
    assert main(["recipes", "tiny-pipe"]) == 2
    assert "Did you mean 'tiny-pipeline'" in capsys.readouterr().err
