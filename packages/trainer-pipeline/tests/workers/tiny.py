"""What the workers train: a small decoder that can keep keys and values, and batches in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dist_env import DistributedEnvInterface, StaticDistributedEnvironment, broadcast_object
from trainer_core import EvalMetric, Trainer, TrainingArguments
from trainer_pipeline import ModelSplitter, PipelineArguments, PipelineTrainer, PipelineTrainingArguments

VOCABULARY, WIDTH, HEADS, LENGTH, LONGEST = 53, 16, 2, 6, 256
SEED = 7
T = TypeVar("T")


class Cache:
    """Keys and values of the layers that were computed here, and how many positions there are."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen = 0

    def extend(self, place: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions to a layer; all its keys and values."""
        if place in self.layers:
            before = self.layers[place]
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        self.layers[place] = (keys, values)
        return keys, values


class Block(nn.Module):
    """Causal attention and feed-forward."""

    def __init__(self, place: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """Map [rows, positions, width] to the same shape."""
        rows, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads[0], heads[1], heads[2]
        if cache is not None:
            k, v = cache.extend(self.place, k, v)
        seen = torch.ones(length, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - length)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH)))
        return x + self.scale * self.dropout(self.down(torch.tanh(self.up(x))))


class Tiny(nn.Module):
    """Embedding, blocks and head; buffers that are saved and that are not."""

    def __init__(self, layers: int = 4, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(place, dropout) for place in range(layers))
        # Drawn in between, so that what is drawn next depends on it.
        self.register_buffer("places", 0.3 * torch.randn(LONGEST, WIDTH))
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, WIDTH), persistent=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and "norm" not in name:
                nn.init.normal_(parameter, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def flops_per_token(self, sequence_length: int) -> float:
        """Told, as counting them would take longer than the steps."""
        return 6.0 * sum(parameter.numel() for parameter in self.parameters())

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]] + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Writing(Tiny):
    """The same, and it takes a cache; remembers those that it has made."""

    def __init__(self, layers: int = 4, *, dropout: float = 0.0) -> None:
        super().__init__(layers, dropout=dropout)
        self.made: list[Cache] = []

    def make_cache(self, rows: int, positions: int) -> Cache:
        """An empty cache."""
        self.made.append(Cache())
        return self.made[-1]

    def forward(self, input_ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits [rows, positions, vocabulary] of positions that follow those in the cache."""
        start = cache.seen if cache else 0
        x = self.embed(input_ids) + self.places[start : start + input_ids.shape[1]] + self.shift
        for layer in self.layers:
            x = layer(x, cache)
        if cache:
            cache.seen += input_ids.shape[1]
        return self.head(self.norm(x))


def seeded(make: Callable[[], nn.Module] = Tiny, seed: int = SEED) -> nn.Module:
    """A model as one process would build it."""
    torch.manual_seed(seed)
    return make()


class Batches:
    """Batches in a fixed order, the last one smaller; rows have different numbers of labels that count."""

    batch_size = 4

    def __init__(self, rows: int = 40, vocabulary: int = VOCABULARY, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        self.labels = self.ids.clone()
        for row in range(rows):
            self.labels[row, : row % (length - 1)] = -100

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for ids, labels in zip(
            self.ids.split(self.batch_size), self.labels.split(self.batch_size), strict=True
        ):
            yield {"input_ids": ids, "labels": labels}


COMMON: dict[str, object] = {
    "use_cpu": True,
    "seed": SEED,
    "per_device_train_batch_size": Batches.batch_size,
    "num_train_epochs": -1,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "check_flops": False,  # takes longer than the steps
}


def trainer_of(
    env: DistributedEnvInterface,
    folder: Path,
    model_init: Callable[[], nn.Module] | None = Tiny,
    *,
    model: nn.Module | None = None,
    train: object | None = None,
    evaluate: object | None = None,
    callbacks: Iterable[object] = (),
    eval_metrics: Mapping[str, EvalMetric] | None = None,
    splitter: ModelSplitter | None = None,
    factory: Callable[..., object] | None = None,
    options: Mapping[str, object] | None = None,
    **settings: object,
) -> PipelineTrainer:
    """A trainer of a few steps; settings of the pipeline go by their own names.

    Args:
        env: This rank.
        folder: Where the run writes.
        model_init: Builds the model; not used with `model`.
        model: A built model.
        train: Data; none: the trainer only builds the model.
        evaluate: Data.
        callbacks: Callbacks.
        eval_metrics: Metrics.
        splitter: Cuts the model.
        factory: A schedule class.
        options: Further ones of the trainer.
        **settings: Of PipelineTrainingArguments or PipelineArguments.
    """
    names = PipelineArguments.__dataclass_fields__
    pipeline = {name: settings.pop(name) for name in list(settings) if name in names}
    given = {
        **COMMON,
        "output_dir": str(folder),
        "pipeline": PipelineArguments(**pipeline),  # type: ignore[arg-type]
        **settings,
    }
    return PipelineTrainer(
        PipelineTrainingArguments(**given),  # type: ignore[arg-type]
        model_splitter=splitter,
        pipe_schedule_factory=factory,  # type: ignore[arg-type]
        model=model,
        model_init=None if model is not None else model_init,
        train_dataset=train,
        eval_dataset=evaluate,
        distributed_env=env,
        callbacks=list(callbacks),
        **{"eval_metrics": eval_metrics, **(options or {})},  # type: ignore[arg-type]
    )


def alone(
    env: DistributedEnvInterface,
    folder: Path,
    model_init: Callable[[], nn.Module] = Tiny,
    *,
    train: object | None = None,
    evaluate: object | None = None,
    eval_metrics: Mapping[str, EvalMetric] | None = None,
    options: Mapping[str, object] | None = None,
    **settings: object,
) -> Trainer:
    """The trainer of one process, on the same batches."""
    given = {**COMMON, "output_dir": str(folder / f"alone-{env.rank}"), **settings}
    return Trainer(
        TrainingArguments(**given),  # type: ignore[arg-type]
        model_init=model_init,
        train_dataset=train,
        eval_dataset=evaluate,
        distributed_env=StaticDistributedEnvironment(),
        callbacks=[],
        **{"eval_metrics": eval_metrics, **(options or {})},  # type: ignore[arg-type]
    )


_KNOWN: dict[str, object] = {}


def once(env: DistributedEnvInterface, key: str, compute: Callable[[], T]) -> T:
    """What rank 0 computes as one process, for every rank and every scenario with this key; collective."""
    if key not in _KNOWN:
        _KNOWN[key] = broadcast_object(compute() if env.rank == 0 else None, env)
    return _KNOWN[key]  # type: ignore[return-value]


def curve(trainer: Trainer) -> list[object]:
    """Loss and norm of the gradient of each step."""
    history = trainer.state.log_history
    return [entry[key] for entry in history if "loss" in entry for key in ("loss", "grad_norm")]
