"""A transform as an outside package would write it: `tensor_parallel.py FOLDER BATCH [MESH]` trains with it.

It prints loss and gradient norm of every step; `torchrun` starts it on several ranks. Only public names of
the packages are used.
"""

from __future__ import annotations

import json
import sys
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_core import BuiltModel, ConfigurationError, DataParallelArguments, ModelTransform, Trainer
from trainer_fsdp2 import FullyShard

STEPS, SAVED = 6, 3


class TensorParallelMLPs(ModelTransform):
    """Divides the hidden units of each MLP over the ranks of the dimension `tensor`."""

    axis: ClassVar[str] = "tensor"

    def apply(self, built: BuiltModel) -> None:
        """Cut the first matrix by its outputs and the second by its inputs, and sum what they give."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        meshes = built.ranks.meshes
        if meshes is None:
            raise ConfigurationError("world_size", 1, "has no mesh to divide MLPs over", "start more ranks")
        plan = {"layers.*.mlp.up": ColwiseParallel(), "layers.*.mlp.down": RowwiseParallel()}
        parallelize_module(built.model, meshes.tensor, plan)


class MLP(nn.Module):
    """Two matrices with biases; half of the 38 hidden units cannot be halved again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 38), nn.Linear(38, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, 16] to the same."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """A mean over what came before, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16), MLP()

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, 16] to the same."""
        before = self.mix(x).cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.mlp(self.norm(x + before))


class Decoder(nn.Module):
    """int64 tokens [rows, positions] to logits [rows, positions, 31]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(folder: str, batch: int, mesh: str | None = None) -> None:
    """Train, or continue from the newest checkpoint in the folder."""
    tokens = torch.randint(0, 31, (96, 12), generator=torch.Generator().manual_seed(0))
    args = DataParallelArguments(
        output_dir=folder,
        mesh=mesh,
        use_cpu=True,
        seed=1,
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        learning_rate=0.01,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVED,
    )
    trainer = Trainer(
        args,
        model_init=Decoder,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[],
        parallel=[FullyShard(), TensorParallelMLPs()],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    points = [[entry["loss"], entry["grad_norm"]] for entry in logged]
    # In one write, so that lines of several ranks do not mix.
    sys.stdout.write(f"points {json.dumps(points)}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
