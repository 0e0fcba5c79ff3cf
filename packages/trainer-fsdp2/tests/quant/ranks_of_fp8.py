"""Two ranks that train FP8 layers: weights gathered as they are, and gathered in float8, with a restart."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from dist_env import DistributedEnvInterface, DistributedEnvironment, barrier
from trainer_core import Trainer
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer, FSDP2TrainingArguments

STEPS, STOP = 6, 3
VOCABULARY, WIDTH = 48, 32
SETTINGS = {
    "use_cpu": True,
    "seed": 5,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": STOP,
    "check_flops": False,
    "fp8_recipe": "tensorwise",
    "fp8_emulate": True,
    "lr_scheduler_type": "constant",
}


class Model(nn.Module):
    """Blocks of linear layers between an embedding and a head that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (8 * STEPS, 16), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def losses(trainer: Trainer) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]  # type: ignore[arg-type]


def train(env: DistributedEnvInterface, output: Path, steps: int, *, float8: bool) -> list[float]:
    arguments = FSDP2TrainingArguments(
        **SETTINGS,  # type: ignore[arg-type]
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=8 // env.world_size,
        fsdp2=FSDP2Arguments(fp8_all_gather=float8),
    )
    trainer = FSDP2Trainer(arguments, model_init=Model, train_dataset=rows(), distributed_env=env)
    trainer.train()
    return losses(trainer)


def main(directory: Path) -> None:
    with DistributedEnvironment(no_accelerator=True) as env:
        seen: dict[str, object] = {"plain": train(env, directory / "plain", STEPS, float8=False)}
        train(env, directory / "float8", STOP, float8=True)
        barrier(env)
        if env.rank == 0:
            shutil.copytree(directory / "float8", directory / "alone")
        barrier(env)
        seen["float8, restarted"] = train(env, directory / "float8", STEPS, float8=True)
        (directory / f"seen-{env.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
