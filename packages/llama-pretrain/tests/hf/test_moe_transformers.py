"""Models with experts give the same logits here and in transformers, in both layouts of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from llama_pretrain import Llama, LlamaConfig, load_pretrained, save_pretrained
from llama_pretrain.cli import main
from llama_pretrain.model.moe_config import Glm4MoeConfig, MixtralConfig
from llama_pretrain.model.moe_weights import has_separate_experts

IDS = torch.randint(0, 61, (2, 100), generator=torch.Generator().manual_seed(1))
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, intermediate_size=40, num_local_experts=4),  # type: ignore[arg-type]
    "glm4_moe": Glm4MoeConfig(
        **SHAPE,  # type: ignore[arg-type]
        intermediate_size=80,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    ),
    "glm4_moe, not normalised": Glm4MoeConfig(
        **SHAPE,  # type: ignore[arg-type]
        intermediate_size=80,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
    ),
}


def model_of(config: LlamaConfig) -> Llama:
    torch.manual_seed(0)
    model = Llama(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


def largest_difference(ours: Llama, theirs: PreTrainedModel) -> float:
    with torch.no_grad():
        return float((ours.eval()(IDS) - theirs.eval()(IDS).logits).abs().max())


def save_separately(model: PreTrainedModel, directory: Path, shard_size: str = "5GB") -> None:
    """As transformers saves a model of its own; one that it has read it saves in the layout that it read."""
    fresh = AutoModelForCausalLM.from_config(model.config)
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(directory, max_shard_size=shard_size)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_layouts_both_ways(name: str, tmp_path: Path) -> None:
    ours = model_of(CONFIGS[name])
    save_pretrained(ours, tmp_path / "ours")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(theirs).__name__ == ours.config.architecture
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert largest_difference(ours, theirs) < 1e-5

    for shard_size in ("5GB", "20KB"):
        saved = tmp_path / shard_size
        save_separately(theirs, saved, shard_size)
        assert has_separate_experts(saved)
        again = load_pretrained(saved)
        assert again.config == ours.config
        assert largest_difference(again, theirs) == 0.0


def test_import_makes_of_separate_experts_what_training_begins_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MixtralConfig(**{**SHAPE, "vocab_size": 320}, intermediate_size=40, num_local_experts=4)  # type: ignore[arg-type]
    save_pretrained(model_of(config), tmp_path / "ours")
    save_separately(AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), tmp_path / "theirs")
    settings = f"--max-steps 1 --sequence-length 32 --sample-tokens 0 --output-dir {tmp_path / 'run'}".split()
    assert main(["train", "--model", str(tmp_path / "theirs"), *settings]) == 2
    assert "llama-pretrain import" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "new"), "--dtype", "float32"]) == 0
    assert main(["train", "--model", str(tmp_path / "new"), *settings]) == 0
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert type(trained).__name__ == "MixtralForCausalLM"
    assert largest_difference(load_pretrained(tmp_path / "run" / "checkpoint-1"), trained) < 1e-5
