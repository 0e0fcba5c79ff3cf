"""A run that is interrupted after any step, and continues in new objects, is bit for bit the same run."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    RNGState,
    SharingPattern,
    StateComponent,
)

STEPS = 12
VOCABULARY = 17
DOCUMENTS = 10
"""No multiple of a batch, so that epochs end in the middle of one."""


class Data:
    """Shuffled documents, batch after batch; the position is the epoch and the place in it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.place = 0

    def batch(self, size: int) -> torch.Tensor:
        return torch.stack([next(self) for _ in range(size)])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        order = random.Random(f"{self.seed} {self.epoch}").sample(range(DOCUMENTS), DOCUMENTS)
        document = order[self.place]
        self.place += 1
        if self.place == DOCUMENTS:
            self.epoch, self.place = self.epoch + 1, 0
        return (torch.arange(6) * (document + 1) + document) % VOCABULARY

    def state_dict(self) -> dict[str, object]:
        return {"seed": self.seed, "epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.epoch, self.place = state["seed"], state["epoch"], state["place"]


class Model(nn.Module):
    """A tied language model in miniature, with dropout and running statistics."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, dtype=dtype)
        self.body = nn.Sequential(
            nn.Linear(8, 16, dtype=dtype), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8, dtype=dtype)
        )
        self.head = nn.Linear(8, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        logits: torch.Tensor = self.head(x + self.body(self.norm(x)))
        return logits


@dataclass
class History:
    """What a run did, step by step."""

    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    documents: list[list[int]] = field(default_factory=list)
    random_numbers: list[tuple[float, float]] = field(default_factory=list)
    """Of Python and numpy, which a collator would use."""


class Run:
    """New objects with a seed of their own, as a new process would make them.

    Args:
        directory: For the checkpoints.
        seed: Of everything.
        dtype: Of the model.
        settings: Of the checkpoints.
    """

    def __init__(
        self, directory: Path, seed: int, *, dtype: torch.dtype = torch.float32, async_save: bool = False
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.step = 0
        self.data = Data(seed)
        self.model = Model(dtype)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 3e-2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
        warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS - 4)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer, [warmup, decay], milestones=[4]
        )
        self.manager = CheckpointManager(
            CheckpointConfig(output_dir=directory, save_total_limit=None, async_save=async_save),
            stateful_provider=self.components(),
        )

    def components(self) -> list[StateComponent]:
        shared, own, single = SharingPattern.REPLICATED, SharingPattern.PER_RANK, SharingPattern.GLOBAL
        optimizer = OptimizerState(self.optimizer, self.model)
        return [
            StateComponent(
                key="model", stateful=ModelState(self.model), sharing_pattern=shared, required=True
            ),
            StateComponent(key="optimizer", stateful=optimizer, sharing_pattern=shared, required=True),
            StateComponent(key="scheduler", stateful=self.scheduler, sharing_pattern=shared, required=True),
            StateComponent(key="dataset", stateful=self.data, sharing_pattern=own, required=True),
            StateComponent(key="trainer", stateful=self, sharing_pattern=single, required=True),
            StateComponent(key="rng", stateful=RNGState(), sharing_pattern=own, required=True),
        ]

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def train(self, until: int, after_step: Callable[["Run"], object] = lambda run: None) -> History:
        """Train until a step."""
        history = History()
        while self.step < until:
            ids = self.data.batch(4)
            logits = self.model(ids)
            loss = nn.functional.cross_entropy(logits.float(), ids.roll(-1, 1).flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            history.losses.append(loss.item())
            history.rates.append(self.scheduler.get_last_lr())
            history.documents.append(ids[:, 1].tolist())
            history.random_numbers.append((random.random(), float(numpy.random.rand())))
            after_step(self)
        return history

    def save(self) -> None:
        self.manager.save_checkpoint(self.step)

    def end(self) -> dict[str, object]:
        """Everything there is at the end, tensors as they are and the rest as plain values."""
        tensors: dict[str, object] = dict(self.model.state_dict())
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{key}": value for key, value in state.items()}
        groups = repr(self.optimizer.state_dict()["param_groups"])
        rest = {
            "groups": groups,
            "scheduler": repr(self.scheduler.state_dict()),
            "data": self.data.state_dict(),
        }
        return {**tensors, **rest, "rng": torch.get_rng_state(), "python": random.getstate()}


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    """Names of what is not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if bits(value) != bits(other[name])]


def bits(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, tuple(value.shape), raw.tolist()


def resume(directory: Path, step: int, seed: int, **settings: object) -> Run:
    """A new run that continues from the checkpoint of a step."""
    run = Run(directory, seed, **settings)  # type: ignore[arg-type]
    loaded = run.manager.load_checkpoint(directory / f"checkpoint-{step}")
    assert loaded is not None
    assert (loaded.step, loaded.missing, run.step) == (step, (), step)
    return run


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="module")
def straight(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> tuple[History, dict[str, object]]:
    """The run that nothing interrupts, and that saves nothing."""
    run = Run(tmp_path_factory.mktemp("straight"), 1, dtype=dtype)
    return run.train(STEPS), run.end()


def test_the_runs_differ_without_their_state(
    straight: tuple[History, dict[str, object]], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Another seed is another run, and dropout, the schedule and the data make every step its own."""
    history, end = straight
    other = Run(tmp_path, 2, dtype=dtype)
    assert not set(other.train(STEPS).losses) & set(history.losses)
    assert {"embed.weight", "norm.running_mean", "0.exp_avg", "rng", "python"} <= set(
        differences(other.end(), end)
    )
    assert len(set(history.losses)) == len({tuple(rates) for rates in history.rates}) == STEPS
    assert Data(1).batch(DOCUMENTS).tolist() != Data(2).batch(DOCUMENTS).tolist()


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_interrupted_after_every_step(
    straight: tuple[History, dict[str, object]],
    dtype: torch.dtype,
    tmp_path: Path,
    async_save: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One run saves after every step and continues; from each checkpoint another one runs to the end."""
    history, end = straight
    first = Run(tmp_path, 1, dtype=dtype, async_save=async_save)
    # An asynchronous save writes while the next step changes everything.
    assert first.train(STEPS, Run.save) == history
    first.manager.close()
    assert differences(first.end(), end) == []
    for step in range(1, STEPS):
        second = resume(tmp_path, step, seed=100 + step, dtype=dtype, async_save=async_save)
        rest = second.train(STEPS)
        assert rest.losses == history.losses[step:], step
        assert rest.rates == history.rates[step:], step
        assert rest.documents == history.documents[step:], step
        assert rest.random_numbers == history.random_numbers[step:], step
        assert differences(second.end(), end) == [], step
        second.manager.close()
    with capsys.disabled():
        print(f"\n{STEPS - 1} interruptions of {STEPS} steps, {len(end)} values each: all bitwise equal")


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "stops", [[3, 7], [1, 11], list(range(1, STEPS))], ids=["twice", "at the ends", "always"]
)
def test_interrupted_again_and_again(
    straight: tuple[History, dict[str, object]],
    dtype: torch.dtype,
    tmp_path: Path,
    stops: list[int],
    async_save: bool,
) -> None:
    """Every stretch begins in new objects, from the newest checkpoint, and ends with a save."""
    history, end = straight
    losses: list[float] = []
    for number, stop in enumerate([*stops, STEPS]):
        run = Run(tmp_path, 1 if number == 0 else 50 + number, dtype=dtype, async_save=async_save)
        loaded = run.manager.load_checkpoint()
        assert (loaded and loaded.step) == (stops[number - 1] if number else None)
        losses += run.train(stop).losses
        run.save()
        run.manager.close()
    assert losses == history.losses
    assert differences(run.end(), end) == []
