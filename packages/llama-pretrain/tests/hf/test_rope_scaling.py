"""Scaled rotary positions: the logits of transformers, read and written in the keys of both its versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import LlamaConfig as HuggingFaceConfig

from llama_pretrain import (
    LinearScaling,
    Llama,
    Llama3Scaling,
    LlamaConfig,
    RopeScaling,
    YarnScaling,
    load_pretrained,
    save_pretrained,
)
from llama_pretrain.cli import main
from llama_pretrain.model.moe_config import Glm4MoeConfig, MixtralConfig

MakeConfig = Callable[..., LlamaConfig]
ORIGINAL, POSITIONS = 64, 256
IDS = torch.randint(0, 61, (2, POSITIONS), generator=torch.Generator().manual_seed(1))

_YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
SCALINGS: dict[str, RopeScaling] = {
    "linear": LinearScaling(factor=4.0),
    "linear, broken factor": LinearScaling(factor=3.3),
    "llama3": Llama3Scaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
    ),
    "llama3, broken factor": Llama3Scaling(
        factor=3.3, low_freq_factor=0.5, high_freq_factor=7.0, original_max_position_embeddings=50
    ),
    "yarn": YarnScaling(**_YARN),  # type: ignore[arg-type]
    "yarn, broken factor": YarnScaling(factor=3.3, original_max_position_embeddings=50),
    "yarn, other betas": YarnScaling(**_YARN, beta_fast=8.0, beta_slow=2.0),  # type: ignore[arg-type]
    "yarn, same betas": YarnScaling(**_YARN, beta_fast=4.0, beta_slow=4.0, truncate=False),  # type: ignore[arg-type]
    "yarn, not truncated": YarnScaling(**_YARN, truncate=False),  # type: ignore[arg-type]
    "yarn, own factor": YarnScaling(**_YARN, attention_factor=1.3),  # type: ignore[arg-type]
    "yarn, mscale": YarnScaling(**_YARN, mscale=0.8, mscale_all_dim=0.4),  # type: ignore[arg-type]
    "yarn, mscale alone": YarnScaling(**_YARN, mscale=0.8),  # type: ignore[arg-type]
    "yarn, factor 1": YarnScaling(factor=1.0, original_max_position_embeddings=POSITIONS),
}


def largest_difference(ours: Llama, theirs: PreTrainedModel) -> float:
    with torch.no_grad():
        return float((ours.eval()(IDS) - theirs.eval()(IDS).logits).abs().max())


@pytest.fixture(params=SCALINGS)
def config(request: pytest.FixtureRequest, small_config: MakeConfig) -> LlamaConfig:
    return small_config(max_position_embeddings=POSITIONS, rope_scaling=SCALINGS[request.param])


def test_transformers_reads_our_export(config: LlamaConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Llama(config)
    save_pretrained(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert largest_difference(ours, theirs) < 1e-5
    # The scaling matters, at positions within the original ones too.
    plain = Llama(replace(config, rope_scaling=None))
    plain.load_state_dict(ours.state_dict())
    far = largest_difference(plain, theirs)
    assert (far > 1e-2) == (config.rope_scaling != SCALINGS["yarn, factor 1"])


def test_we_read_what_transformers_saves(config: LlamaConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(HuggingFaceConfig.from_dict(config.to_dict()))
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    assert ours.config == config
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_keys_of_transformers_4_are_read_as_it_reads_them(
    config: LlamaConfig, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save_pretrained(Llama(config), tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    del values["rope_parameters"]
    values["rope_scaling"][name] = values["rope_scaling"].pop("rope_type")
    file.write_text(json.dumps(values))
    assert LlamaConfig.load(tmp_path) == config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.rope_parameters["rope_theta"] == config.rope_theta
    assert largest_difference(load_pretrained(tmp_path), theirs) < 1e-5


@pytest.mark.parametrize(
    "given",
    [
        {"rope_type": "yarn", "factor": 2.0},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": ORIGINAL},
        {"rope_type": "yarn", "factor": 4, "attention_factor": None, "beta_fast": None, "truncate": True},
        {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4},
        {"rope_type": "linear", "type": "yarn", "factor": 2.0, "rope_theta": 700.0},
        {"type": "linear", "factor": 2.0},
        {"type": "default"},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_what_is_left_out_is_what_transformers_takes(
    small_config: MakeConfig, key: str, given: dict[str, object], tmp_path: Path
) -> None:
    values = small_config(max_position_embeddings=POSITIONS).to_dict()
    del values["rope_parameters"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values | {key: given}))
    torch.manual_seed(0)
    ours = Llama(LlamaConfig.load(tmp_path))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs.load_state_dict(ours.state_dict())
    assert largest_difference(ours, theirs) < 1e-5


_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WITH_EXPERTS = {
    "mixtral": MixtralConfig(**_SHAPE, intermediate_size=40, num_local_experts=4),  # type: ignore[arg-type]
    "glm4_moe": Glm4MoeConfig(
        **_SHAPE,  # type: ignore[arg-type]
        intermediate_size=80,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
    ),
}


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_models_with_experts_are_scaled_too(kind: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Llama(replace(WITH_EXPERTS[kind], rope_scaling=SCALINGS[name]))
    save_pretrained(ours, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs).__name__ == ours.config.architecture
    assert largest_difference(ours, theirs) < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_pretrained(tmp_path / "theirs")
    assert again.config == ours.config
    assert largest_difference(again, theirs) < 1e-5


def test_a_model_is_continued_on_longer_rows(
    write_inputs: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = write_inputs(tmp_path)
    replace(LlamaConfig.load(work / "shape"), max_position_embeddings=128).save(work / "shape")
    settings = ["--data", str(work / "data"), "--held-out", "0.2", "--warmup-steps", "2", "--save-steps", "3"]
    settings += ["--lr-scheduler-type", "constant_with_warmup", "--sample-tokens", "0"]
    settings += ["--per-device-train-batch-size", "2", "--logging-steps", "1"]

    def train(model: str, output: str, length: int, *more: str) -> int:
        where = ["--model", str(work / model), "--output-dir", str(work / output)]
        return main(["train", *where, *settings, "--sequence-length", str(length), *more])

    assert train("shape", "short", 128, "--max-steps", "6") == 0
    assert main(["export", str(work / "base"), "--output-dir", str(work / "short")]) == 0

    capsys.readouterr()
    assert train("shape", "long", 512) == 2
    assert "or choose a model with more positions\n" in capsys.readouterr().err.replace(".\n", "\n")
    assert train("base", "long", 512) == 2
    assert "or stretch this one with rope_scaling, such as --rope-scaling yarn" in capsys.readouterr().err
    assert train("base", "long", 128, "--rope-scaling", "yarn") == 2
    assert "rope_scaling='yarn' has no effect, because rows of sequence_length=128 fit" in (
        capsys.readouterr().err
    )

    scaled = ["--rope-scaling", "yarn"]
    assert train("base", "long", 512, *scaled, "--dry-run") == 0
    assert not (work / "long").exists()
    assert train("base", "whole", 512, *scaled, "--max-steps", "6") == 0
    for steps in ("3", "6"):  # the second start resumes the first
        assert train("base", "long", 512, *scaled, "--max-steps", steps) == 0
    curves = [json.loads((work / name / "trainer_logs.json").read_text()) for name in ("whole", "long")]
    whole, long = ([entry["loss"] for entry in curve if "loss" in entry] for curve in curves)
    assert len(whole) == 6
    assert whole == pytest.approx(long, abs=1e-6)
    capsys.readouterr()
    assert train("base", "long", 512, "--rope-scaling", "linear", "--max-steps", "6") == 2
    told = capsys.readouterr().err
    assert "model={'rope_scaling': {'rope_type': 'linear', 'factor': 4.0}} differs from the run in" in told
    assert "begun with {'rope_scaling': {'rope_type': 'yarn'" in told

    assert main(["eval", "--output-dir", str(work / "long")]) == 0
    words = ["generate", "def ", "--output-dir", str(work / "long"), "--max-new-tokens", "300"]
    assert main([*words, "--temperature", "0"]) == 0  # more than the model had positions before
    assert main(["export", str(work / "stretched"), "--output-dir", str(work / "long")]) == 0
    ours = load_pretrained(work / "stretched")
    assert ours.config.max_position_embeddings == 512
    assert ours.config.rope_scaling == YarnScaling(factor=4.0, original_max_position_embeddings=128)
    theirs = AutoModelForCausalLM.from_pretrained(work / "stretched")
    assert theirs.config.rope_parameters["rope_type"] == "yarn"
    assert largest_difference(ours, theirs) < 1e-5

    # Once more: the same kind goes further, another one is refused by name.
    capsys.readouterr()
    assert train("stretched", "longer", 1024, "--rope-scaling", "linear") == 2
    assert "cannot be combined with the scaling that the model" in capsys.readouterr().err
    assert train("stretched", "longer", 1024, *scaled, "--max-steps", "1") == 0
    longer = LlamaConfig.load(work / "longer" / "checkpoint-1")
    assert longer.rope_scaling == YarnScaling(factor=8.0, original_max_position_embeddings=128)
