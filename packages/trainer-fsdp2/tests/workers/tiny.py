"""What the workers train: a small transformer-like model, and batches in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from dist_env import DistributedEnvInterface
from trainer_fsdp2 import FSDP2Arguments, FSDP2Trainer, FSDP2TrainingArguments

VOCABULARY, WIDTH, LENGTH = 53, 16, 6
SEED = 7


class Block(nn.Module):
    """Mixes each position with those before it. Some layers have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixing = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.narrow = nn.Linear(WIDTH, 4, bias=False)
        self.wide = nn.Linear(4, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map [batch, positions, width] to the same shape."""
        hidden = self.norm(x)
        past = hidden.cumsum(dim=1) / positions[: x.shape[1], None]
        return x + self.gate(hidden) * torch.tanh(self.mixing(past)) + self.wide(self.narrow(hidden))


class Tiny(nn.Module):
    """Embedding, blocks, and a head tied to the embedding; buffers that are saved and that are not."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        # Drawn in between, so that what is drawn next depends on it.
        self.register_buffer("noise", 0.1 * torch.randn(WIDTH))
        self.register_buffer("positions", torch.arange(1.0, LENGTH + 1), persistent=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and "norm" not in name and "gate" not in name:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]."""
        x = self.embed(input_ids) + self.noise
        for layer in self.layers:
            x = layer(x, self.positions)
        return self.head(self.norm(x))


class Batches:
    """Batches of equal size in a fixed order."""

    batch_size = 2

    def __init__(self, rows: int = 48, vocabulary: int = VOCABULARY) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocabulary, (rows, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids) // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids in self.ids.split(self.batch_size):
            yield {"input_ids": ids, "labels": ids}


def trainer_of(
    env: DistributedEnvInterface,
    folder: Path,
    model_init: Callable[[], nn.Module] | None = Tiny,
    *,
    model: nn.Module | None = None,
    train: object | None = None,
    evaluate: object | None = None,
    callbacks: Iterable[object] = (),
    **settings: object,
) -> FSDP2Trainer:
    """A trainer of a few steps; settings of fsdp2 go by their own names.

    Args:
        env: This rank.
        folder: Where the run writes.
        model_init: Builds the model; not used with `model`.
        model: A built model.
        train: Data; none: the trainer only builds the model.
        evaluate: Data.
        callbacks: Callbacks.
        **settings: Of FSDP2TrainingArguments or FSDP2Arguments.
    """
    names = FSDP2Arguments.__dataclass_fields__
    fsdp2 = {name: settings.pop(name) for name in list(settings) if name in names}
    given: dict[str, object] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "seed": SEED,
        "per_device_train_batch_size": Batches.batch_size,
        "num_train_epochs": -1,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "check_flops": False,  # takes longer than the steps
        "fsdp2": FSDP2Arguments(**fsdp2),  # type: ignore[arg-type]
        **settings,
    }
    return FSDP2Trainer(
        FSDP2TrainingArguments(**given),  # type: ignore[arg-type]
        model=model,
        model_init=None if model is not None else model_init,
        train_dataset=train,
        eval_dataset=evaluate,
        distributed_env=env,
        callbacks=list(callbacks),
    )


def losses(trainer: FSDP2Trainer) -> list[object]:
    """The curve."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
