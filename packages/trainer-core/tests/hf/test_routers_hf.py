"""The balance of routers of Hugging Face models: that of transformers for each row, and one curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from trainer_core import (
    CausalLMLoss,
    ConfigurationError,
    ModelLoss,
    Trainer,
    TrainingArguments,
    count_next_tokens,
)

VOCABULARY, USED, EXPERTS = 37, 2, 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": USED,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MADE = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": EXPERTS}),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"num_experts": EXPERTS, "moe_intermediate_size": 16}),
}


def make(name: str, layers: int = 2, **changes: object) -> PreTrainedModel:
    model, config, own = MADE[name]
    torch.manual_seed(3)
    return model(config(**{**SHAPE, **own, "num_hidden_layers": layers, **changes}))


def rows(count: int = 8, length: int = 10) -> list[dict[str, Tensor]]:
    """Rows whose ends are padding, and which count from the second or third token on."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for number in range(count):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[length - number % 4 :] = -100
        labels[: number % 3] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def trained(model: PreTrainedModel, directory: Path, rows_at_once: int, **options: object) -> Trainer:
    trainer = Trainer(
        TrainingArguments(
            output_dir=str(directory),
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=8 // rows_at_once,
            max_steps=3,
            logging_steps=1,
            learning_rate=0.01,
            max_grad_norm=None,
            use_cpu=True,
            seed=1,
            save_strategy="no",
            **options.pop("args", {}),  # type: ignore[arg-type]
        ),
        model=model,
        train_dataset=rows(),
        callbacks=[],
        **options,  # type: ignore[arg-type]
    )
    trainer.train()
    return trainer


def logged(trainer: Trainer, name: str) -> list[float]:
    return [float(entry[name]) for entry in trainer.state.log_history if name in entry]


def norm_by_hand(model: PreTrainedModel, coefficient: float) -> float:
    """Of the gradient of all rows: token losses, and the balance of each row and layer by transformers."""
    loss, data = CausalLMLoss(), rows()
    tokens = sum(int(count_next_tokens(row["labels"][None])) for row in data)
    total = torch.zeros(())
    for row in data:
        out = model(row["input_ids"][None])
        targets = loss.make_targets(row["labels"][None])
        counted = (targets != -100).long()
        layers = [
            load_balancing_loss_func((logits,), EXPERTS, USED, attention_mask=counted)
            for logits in out.router_logits
        ]
        balance = sum(layers) / len(layers)
        total = total + loss.on_targets(out.logits, targets) + coefficient * counted.sum() * balance
    (total / tokens).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize(
    "name", ["qwen2_moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("mixtral", "qwen3_moe"))]
)
def test_one_curve_and_the_gradient_by_hand(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = trained(make(name), tmp_path / "whole", 8)
    parts = trained(make(name), tmp_path / "parts", 2, args={"activation_checkpointing": "full"})
    for entry in ("loss", "grad_norm", "aux_loss", "aux_loss_weighted", "router_entropy", "expert_load_max"):
        assert logged(parts, entry) == pytest.approx(logged(whole, entry), rel=1e-5), entry
    assert logged(whole, "grad_norm")[0] == pytest.approx(norm_by_hand(make(name), 0.2), rel=1e-5)
    off = trained(make(name, output_router_logits=False), tmp_path / "off", 8)
    assert logged(off, "grad_norm")[0] == pytest.approx(norm_by_hand(make(name), 0.0), rel=1e-5)
    assert abs(logged(off, "grad_norm")[0] / logged(whole, "grad_norm")[0] - 1) > 1e-4
    assert not [record for record in caplog.records if "auxiliary loss" in record.message]


def test_one_row_in_one_layer_has_the_loss_of_transformers(tmp_path: Path) -> None:
    model = make("mixtral", layers=1)
    ids = rows(1, 12)[0]["input_ids"][None]
    expected = model(ids[:, :-1]).aux_loss.item()
    data = [{"input_ids": ids[0], "labels": ids[0]}] * 8
    trainer = Trainer(
        TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, logging_steps=1, use_cpu=True, save_strategy="no"
        ),
        model=model,
        train_dataset=data,
        callbacks=[],
    )
    trainer.train()
    assert logged(trainer, "aux_loss") == pytest.approx([expected], rel=1e-5)


def test_a_loss_of_the_model_itself_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="an auxiliary loss"):
        trained(make("mixtral"), tmp_path, 8, compute_loss_func=ModelLoss(count=count_next_tokens))
