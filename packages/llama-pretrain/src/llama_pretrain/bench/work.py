"""What every baseline trains: one model with the same weights, the same rows in the same order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ..commands.arguments import BenchArguments
from ..model.config import LlamaConfig
from ..model.llama import Llama

LEARNING_RATE = 3e-4
CLIP_NORM = 1.0
Example = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one trial: AdamW with a constant rate and no decay, gradients clipped, one pass in order.

    Attributes:
        config: Shape of the model.
        examples: One per row, `input_ids` and `labels` the same; on the CPU.
        args: Batch size, precision and compilation.
        device: Where it is trained.
        directory: Where a baseline may write.
    """

    config: LlamaConfig
    examples: list[Example]
    args: BenchArguments
    device: torch.device
    directory: Path

    @classmethod
    def of(cls, config: LlamaConfig, args: BenchArguments, device: torch.device, directory: Path) -> Work:
        """The work that the settings ask for."""
        rows = total_steps(args) * args.per_device_train_batch_size
        tokens = _tokens((rows, args.sequence_length), config.vocab_size)
        examples = [{"input_ids": row, "labels": row} for row in tokens]
        return cls(config=config, examples=examples, args=args, device=device, directory=directory)

    @property
    def steps(self) -> int:
        """Optimizer steps, those of the warm-up included."""
        return total_steps(self.args)

    @property
    def batch_size(self) -> int:
        """Rows of one step."""
        return self.args.per_device_train_batch_size

    def model(self) -> Llama:
        """A new model on the device, with the same weights each time."""
        torch.manual_seed(0)
        with self.device:
            return Llama(self.config)

    def compiled(self, model: nn.Module) -> nn.Module:
        """The model, compiled if the settings say so."""
        return cast(nn.Module, torch.compile(model)) if self.args.torch_compile else model

    def loader(self) -> Any:
        """A new torch loader of the examples, in order."""
        return DataLoader(cast("Dataset[Example]", self.examples), batch_size=self.batch_size)

    @torch.no_grad()
    def loss(self, model: Llama) -> float:
        """The mean loss of the first batch, in float32."""
        rows = torch.stack([each["input_ids"] for each in self.examples[: self.batch_size]]).to(self.device)
        # By its class: Accelerate leaves a `forward` of its own, under autocast, in the object.
        return mean_loss(Llama.forward(model, rows), rows).item()


def total_steps(args: BenchArguments) -> int:
    """Optimizer steps of a trial."""
    return args.warm_up_steps + args.steps


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token, averaged over the tokens of the batch."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _tokens(shape: tuple[int, int], vocabulary: int) -> Tensor:
    """Random ids of which low ones are frequent, so that there is something to learn within few steps."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (uniform**3 * vocabulary).long()
