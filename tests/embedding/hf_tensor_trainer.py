"""Trains an unmodified model of transformers: `hf_tensor_trainer.py MODEL FOLDER BATCH [MESH [SETTING]]`.

SETTING is sequence; dropout: by the sequence, recomputed and saved in the middle, too; or flops: recomputed,
and what each log entry counts of it is printed instead.

It prints loss and gradient norm of every step, and what the model writes; `torchrun` starts it on several
ranks, which divide the model by its own plan.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from perf_metrics import DefaultMetrics
from trainer_core import DataParallelArguments, TensorParallel, Trainer

SIZES = {"vocab_size": 63, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.08}
# Wide enough that experts are clearly apart: a tie would turn with the last bit.
BALANCED = SIZES | {"initializer_range": 0.2, "output_router_logits": True, "router_aux_loss_coef": 0.05}
BALANCED |= {"num_experts_per_tok": 2}


def build(name: str, dropout: float = 0.0) -> PreTrainedModel:
    """A small one, with fewer heads of keys and values than of queries where it can have that."""
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, attention_dropout=dropout, **SIZES))
    if name == "qwen3":
        return Qwen3ForCausalLM(
            Qwen3Config(num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **SIZES)
        )
    if name == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **BALANCED))
    if name == "qwen3_moe":
        own = {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_key_value_heads=2, **own, **BALANCED))
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))


class Record:
    """Keeps what is logged, behind what other callbacks add to it."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def on_log(
        self, args: object, state: object, control: object, *, logs: dict[str, Any], **kw: object
    ) -> None:
        if "flos" in logs:
            self.entries.append(dict(logs))


def main(name: str, folder: str, batch: int, mesh: str = "", setting: str = "") -> None:
    """Train, save the weights, and let the model write."""
    tokens = torch.randint(0, SIZES["vocab_size"], (96, 12), generator=torch.Generator().manual_seed(0))
    args = DataParallelArguments(
        output_dir=folder,
        mesh=mesh or None,
        use_cpu=True,
        seed=1,
        per_device_train_batch_size=batch,
        max_steps=6,
        learning_rate=0.003,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps" if setting == "dropout" else "no",
        save_steps=3,
        activation_checkpointing="full" if setting in ("dropout", "flops") else "no",
        peak_hardware_flops=1e12,
    )
    record = Record()
    trainer = Trainer(
        args,
        model_init=lambda: build(name, 0.2 if setting == "dropout" else 0.0),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[DefaultMetrics(), record] if setting == "flops" else [],
        parallel=[TensorParallel(sequence=True)] if setting in ("sequence", "dropout") else [],
    )
    trainer.save_model(f"{folder}/initial")
    trainer.train()
    trainer.save_model(f"{folder}/weights")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    points = [[entry["loss"], entry["grad_norm"]] for entry in logged]
    if setting == "flops":
        points = [
            [entry[name] for name in ("flos", "hardware_flos", "total_flos")] for entry in record.entries
        ]
        for entry in record.entries:
            most = entry["interval_seconds"] * entry["peak_flops"]
            assert math.isclose(entry["mfu"], entry["flos"] / most)
            assert math.isclose(entry["hfu"], entry["hardware_flos"] / most)
    with trainer.generating(), torch.no_grad():
        written = (
            trainer.unwrapped_model().generate(tokens[:2, :4], max_new_tokens=5, do_sample=False).tolist()
        )
    # In one write, so that lines of several ranks do not mix.
    sys.stdout.write(f"points {json.dumps([points, written])}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
