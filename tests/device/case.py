"""The model, the data and the runs that tests on the fake device share, on one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_pretrain.model.config import LlamaConfig
from llama_pretrain.model.llama import Llama
from trainer_core import Trainer, TrainingArguments

VOCABULARY = 50
Curve = list[tuple[float, float]]


class Model(nn.Module):
    """Four equal layers: int64 [batch, sequence] to logits [batch, sequence, 50]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


class Attention(Model):
    """The same behind attention, which the fake device computes by the plain implementation."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def llama() -> nn.Module:
    """A small Llama, which tells how it is divided among ranks."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Llama(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape))


def experts() -> nn.Module:
    """The same with experts, whose routers are balanced."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = {
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        **shape,
    }
    return Llama(
        LlamaConfig.from_dict(
            {"model_type": "mixtral", "vocab_size": VOCABULARY, "max_position_embeddings": 64, **given}
        )
    )


def rows(count: int = 64, length: int = 16) -> list[dict[str, Tensor]]:
    """Rows whose next token follows from the last one, with prompts that do not count."""
    made = []
    for number in range(count):
        tokens = (torch.arange(length) * 7 + number * 3) % VOCABULARY
        labels = tokens.clone()
        labels[: number % 5] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


SETTINGS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": -1,
    "max_steps": 6,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "max_grad_norm": 1.0,
    "save_strategy": "no",
    "check_flops": False,
    "seed": 7,
}


def make(
    directory: Path,
    *callbacks: object,
    model: Callable[[], nn.Module] = Model,
    eval_dataset: object = None,
    **settings: Any,
) -> Trainer:
    """A trainer of one process; the same seed gives the same run."""
    args = TrainingArguments(output_dir=str(directory), **{**SETTINGS, **settings})
    return Trainer(
        args,
        model_init=model,
        train_dataset=rows(),
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
    )


def curve(trainer: Trainer) -> Curve:
    """Loss and gradient norm of every logged step."""
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(float(entry["loss"]), float(entry["grad_norm"])) for entry in logged]


def losses(points: Curve) -> list[float]:
    return [loss for loss, _ in points]


class Stop:
    """Asks for the end of the run after an optimizer step, with the schedule of the whole run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: object, state: Any, control: Any, **_: object) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


class WaitsByStep:
    """Collects the waits of the host from the begin to the end of each optimizer step, and between steps."""

    def __init__(self) -> None:
        self.by_step: list[list[str]] = []
        self._seen = 0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._seen = len(self._waits())

    def on_step_end(self, *_: object, **__: object) -> None:
        waits = self._waits()
        self.by_step.append([f"{wait.what} at {wait.where}" for wait in waits[self._seen :]])
        self._seen = len(waits)

    @staticmethod
    def _waits() -> list[Any]:
        import fakecuda

        return fakecuda.waits

    def late(self, first: int = 2) -> Iterator[str]:
        """What waited in the steps after the first ones, which set up things once."""
        for number, waits in enumerate(self.by_step):
            if number >= first:
                yield from (f"step {number + 1}: {wait}" for wait in waits)


class WaitsByBatch:
    """Collects the waits of the host from each batch of an evaluation to the next one."""

    def __init__(self) -> None:
        self.by_batch: list[list[str]] = []
        self._seen: int | None = None

    def on_prediction_step(self, *_: object, **__: object) -> None:
        waits = WaitsByStep._waits()
        if self._seen is not None:
            self.by_batch.append([f"{wait.what} at {wait.where}" for wait in waits[self._seen :]])
        self._seen = len(waits)

    def on_evaluate(self, *_: object, **__: object) -> None:
        self._seen = None
