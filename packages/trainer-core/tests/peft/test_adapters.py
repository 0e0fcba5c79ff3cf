"""A model with adapters of peft: what is saved of it, and what a run can be resumed with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoint_core import CheckpointError
from trainer_core import ConfigurationError, PaddingCollator, Trainer
from trainer_core.checkpointing import save_adapters

ROWS = [{"input_ids": list(range(1 + start, 3 + start + start % 5))} for start in range(32)]
IDS = torch.tensor([[3, 4, 5, 6, 7]])


def base() -> LlamaForCausalLM:
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, pad_token_id=0, **sizes))


def adapted(rank: int = 4) -> PeftModel:
    targets = ["q_proj", "v_proj"]
    return get_peft_model(base(), LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM"))


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits  # type: ignore[no-any-return]


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> MakeTrainer:
    def build(model_init: Callable[[], torch.nn.Module] = adapted, **settings: Any) -> Trainer:
        usual = {"output_dir": str(tmp_path / "run"), "learning_rate": 1e-2, "use_cpu": True}
        usual |= {"max_steps": 4, "num_train_epochs": -1}
        data = {"train_dataset": ROWS, "data_collator": PaddingCollator()}
        return Trainer({**usual, **settings}, model_init=model_init, callbacks=[], **data)  # type: ignore[arg-type]

    return build


def test_only_adapters_are_trained_and_exported(make: MakeTrainer, tmp_path: Path) -> None:
    trainer = make()
    trainer.train()
    before = base().state_dict()
    after = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): value
        for name, value in trainer.model.state_dict().items()
        if "lora_" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    trainer.save_model(str(tmp_path / "adapters"))
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(saved) == 8
    assert all("lora_" in name for name in saved)
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapters")
    assert torch.equal(logits_of(loaded), logits_of(trainer.model))


def test_adapters_that_are_there_are_kept(make: MakeTrainer, tmp_path: Path) -> None:
    target = tmp_path / "adapters"
    trainer = make()
    trainer.save_model(str(target))
    untrained = load_file(target / "adapter_model.safetensors")
    trainer.train()
    with pytest.raises(ConfigurationError, match="has adapters already"):
        trainer.save_model(str(target))
    kept = load_file(target / "adapter_model.safetensors")
    assert all(torch.equal(value, untrained[name]) for name, value in kept.items())
    again = make(resume_from_checkpoint=True, overwrite_output_dir=True)
    again.load_checkpoint()
    again.save_model(str(target))
    assert torch.equal(logits_of(PeftModel.from_pretrained(base(), target)), logits_of(trainer.model))


def test_a_model_without_adapters_is_told_how_to_be_saved(make: MakeTrainer, tmp_path: Path) -> None:
    trainer = make(model_init=base)
    with pytest.raises(TypeError, match=r"LlamaForCausalLM has no adapters .* Return what get_peft"):
        save_adapters(trainer._prepare(), str(tmp_path / "adapters"), None, overwrite=False)


def test_adapters_that_are_not_trained_are_exported_too(make: MakeTrainer, tmp_path: Path) -> None:
    make().save_model(str(tmp_path / "first"))

    def loaded() -> PeftModel:
        return PeftModel.from_pretrained(base(), tmp_path / "first")  # frozen, to be used

    trainer = Trainer({"output_dir": str(tmp_path / "used"), "use_cpu": True}, model_init=loaded)
    trainer.save_model(str(tmp_path / "second"))
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_trained_beside_the_adapters_is_not_left_out_in_silence(
    make: MakeTrainer, tmp_path: Path
) -> None:
    def with_head() -> PeftModel:
        model = adapted()
        model.get_output_embeddings().requires_grad_(True)
        return model

    trainer = make(with_head)
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight.*modules_to_save"):
        trainer.save_model(str(tmp_path / "adapters"))
    assert not (tmp_path / "adapters").exists()

    def with_copied_head() -> PeftModel:
        more = {"use_dora": True, "modules_to_save": ["lm_head"], "bias": "all"}
        return get_peft_model(
            base(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
        )

    make(with_copied_head).save_model(str(tmp_path / "all"))
    names = load_file(tmp_path / "all" / "adapter_model.safetensors")
    assert any("lm_head" in name for name in names)


def test_embeddings_that_the_base_directory_lacks_are_exported(make: MakeTrainer, tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")

    def resized(new_rows: float) -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        model.resize_token_embeddings(66)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            torch.nn.init.constant_(layer.weight.data[64:], new_rows)
        return model  # type: ignore[no-any-return]

    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make(lambda: get_peft_model(resized(0.5), config))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    loaded = PeftModel.from_pretrained(resized(0.0), tmp_path / "adapters")
    assert torch.equal(logits_of(loaded), logits_of(trainer.model))


def test_adapters_that_peft_computes_or_prunes_are_exported(make: MakeTrainer, tmp_path: Path) -> None:
    prefix = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    make(lambda: get_peft_model(base(), prefix)).save_model(str(tmp_path / "prefix"))
    assert len(load_file(tmp_path / "prefix" / "adapter_model.safetensors")) == 1

    targets = r".*\.0\.self_attn\.q_proj"
    pruned = AdaLoraConfig(init_r=4, total_step=4, target_modules=targets, task_type="CAUSAL_LM")
    trainer = make(lambda: get_peft_model(base(), pruned))
    trainer.evaluate(ROWS)
    pruned.rank_pattern = {"model.layers.0.self_attn.q_proj.lora_E": [True, False, False, True]}
    trainer.save_model(str(tmp_path / "pruned"))
    saved = load_file(tmp_path / "pruned" / "adapter_model.safetensors")
    assert [value.shape[0] for name, value in saved.items() if "lora_A" in name] == [2]


def test_a_checkpoint_continues_with_its_own_base(make: MakeTrainer) -> None:
    straight = make(max_steps=8, save_steps=4, logging_steps=1)
    straight.train()
    path, _ = sorted(each.parent for each in Path(straight.args.output_dir).glob("*/manifest.json"))
    assert not (path / "config.json").exists(), "a loader of its class would find none of its weights"

    def other_base() -> PeftModel:
        model = adapted()
        torch.nn.init.zeros_(model.get_input_embeddings().weight)
        return model

    home = {"output_dir": f"{straight.args.output_dir}-resumed", "resume_from_checkpoint": str(path)}
    resumed = make(other_base, max_steps=8, logging_steps=1, **home)
    resumed.train()
    curves = [[e["loss"] for e in each.state.log_history if "loss" in e] for each in (straight, resumed)]
    assert len(curves[0]) == 8
    assert curves[0] == curves[1]
    assert len(resumed.optimizer.state) == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("model_init", [base, lambda: adapted(rank=8)], ids=["no adapters", "other adapters"])
def test_a_checkpoint_of_other_adapters_is_refused(make: MakeTrainer, model_init: Any) -> None:
    make().train()
    with pytest.raises(CheckpointError, match="the weights do not fit the model"):
        make(model_init, max_steps=8).train()
