"""Two ranks whose stages have converted layers, and one process with the same microbatches."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dist_env import DistributedEnvironment, StaticDistributedEnvironment
from trainer_core import Trainer, TrainingArguments
from trainer_pipeline import PipelineArguments, PipelineTrainer, PipelineTrainingArguments

STEPS = 6
VOCABULARY, WIDTH = 48, 32
MICROBATCHES = 4
WAYS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "fp8, 1f1b": ("1f1b", {"fp8_recipe": "tensorwise", "fp8_emulate": True}),
    "fp8, zbv": ("zbv", {"fp8_recipe": "tensorwise", "fp8_emulate": True}),
    "qat, 1f1b": ("1f1b", {"qat_recipe": "int8-dynamic-act-int4-weight"}),
}
"""Schedule and settings."""


class Block(nn.Module):
    """A linear layer that is added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu()


class Model(nn.Module):
    """Blocks between an embedding and a head that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (8 * STEPS, 16), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def settings(output: Path, given: Mapping[str, object], rows_at_once: int) -> dict[str, object]:
    return {
        "use_cpu": True,
        "seed": 5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "output_dir": str(output),
        "per_device_train_batch_size": rows_at_once,
        **given,
    }


def seen(trainer: Trainer) -> dict[str, object]:
    trainer.train()
    names = {type(module).__name__ for module in trainer.unwrapped_model().modules()}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "classes": sorted(names)}


def alone(output: Path, given: Mapping[str, object]) -> dict[str, object]:
    # Microbatches as in the pipeline: their activations have one scale each.
    arguments = settings(output, {**given, "gradient_accumulation_steps": MICROBATCHES}, 8 // MICROBATCHES)
    return seen(
        Trainer(
            TrainingArguments(**arguments),  # type: ignore[arg-type]
            model_init=Model,
            train_dataset=rows(),
            distributed_env=StaticDistributedEnvironment(),
            callbacks=[],
        )
    )


def main(directory: Path) -> None:
    found: dict[str, object] = {}
    with DistributedEnvironment(no_accelerator=True) as env:
        for way, (schedule, given) in WAYS.items():
            pipeline = PipelineArguments(schedule=schedule, n_microbatches=MICROBATCHES)
            arguments = settings(directory / way, {**given, "pipeline": pipeline}, 8)
            trainer = PipelineTrainer(
                PipelineTrainingArguments(**arguments),  # type: ignore[arg-type]
                model_init=Model,
                train_dataset=rows(),
                distributed_env=env,
                callbacks=[],
            )
            found[way] = {"ranks": seen(trainer), "alone": alone(directory / f"{way} {env.rank}", given)}
        (directory / f"seen-{env.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
