"""What a rank holds, needs for a while, and reads of a model of 138 MB."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from ranks import TRAINING_TIMEOUT, Scenario
from tiny import Batches, trainer_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    SharingPattern,
    StateComponent,
    load_model_weights,
)
from dist_env import DistributedEnvInterface, StaticDistributedEnvironment, barrier
from trainer_fsdp2 import FSDP2Trainer

VOCABULARY, WIDTH, LAYERS, FILES = 2001, 512, 16, 4


class Layer(nn.Module):
    """Feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, positions, width] to the same shape."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Large(nn.Module):
    """16 layers of 8 MiB, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary]."""
        x = self.embed(input_ids) + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def bytes_read() -> int:
    """What this process has asked the system to read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


class Peak:
    """The most memory that was in use during a block, beyond what was in use before; and what was read."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self._resident, self._read = status("VmRSS"), bytes_read()
        return self

    def __exit__(self, *_: object) -> None:
        self.read = bytes_read() - self._read
        self.extra = status("VmHWM") - self._resident


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of what this rank has of tensors."""
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


class StateSize:
    """Counts the bytes of parameters, gradients and optimizer state when gradients are there."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kw: object) -> None:
        model: nn.Module = kw["model"]  # type: ignore[assignment]
        self.bytes["parameters"] = held(model.parameters())
        self.bytes["gradients"] = held(parameter.grad for parameter in model.parameters())

    def on_train_end(self, args: object, state: object, control: object, **kw: object) -> None:
        optimizer: torch.optim.Optimizer = kw["optimizer"]  # type: ignore[assignment]
        values = [value for each in optimizer.state.values() for value in each.values()]
        self.bytes["optimizer"] = held(value for value in values if isinstance(value, Tensor))


def trained(env: DistributedEnvInterface, folder: Path) -> tuple[FSDP2Trainer, dict[str, int]]:
    """A trainer after one step, and the size of its state."""
    size = StateSize()
    trainer = trainer_of(
        env, folder, Large, train=Batches(vocabulary=VOCABULARY), max_steps=1, callbacks=[size]
    )
    trainer.train()
    return trainer, size.bytes


def warm_up(env: DistributedEnvInterface, folder: Path) -> None:
    """Train, save and load a tiny model: what is imported and loaded for that is not memory of a model."""
    for _ in range(2):
        trainer = trainer_of(env, folder / "warm", train=Batches(), max_steps=1)
        trainer.train()
        if trainer.saved_step < 0:
            trainer.save_checkpoint()


def export(env: DistributedEnvInterface, model: nn.Module, folder: Path) -> None:
    """Write a Hugging Face directory of four files; collective."""
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    component = StateComponent(
        key="model", stateful=ModelState(model), sharing_pattern=SharingPattern.SHARDED
    )
    config = CheckpointConfig(
        output_dir=folder / "unused", max_shard_size=whole // FILES + 2**23, timeout_seconds=TRAINING_TIMEOUT
    )
    with CheckpointManager(config, dist=env, stateful_provider=[component]) as manager:
        manager.save_model(folder / "exported")


def measured(env: DistributedEnvInterface, folder: Path) -> object:
    """Build, export, load, train, save and load again."""
    warm_up(env, folder)
    trainer = partial(trainer_of, env, folder / "run", Large)
    with Peak() as building:
        source = trainer().unwrapped_model()
    first = trainer(seed=8)
    first.unwrapped_model()
    with Peak() as saving_model:
        first.save_model(str(folder / "by the trainer"))
    with Peak() as exporting:
        export(env, source, folder)
    files = sorted(path.name for path in (folder / "exported").glob("*.safetensors"))
    del first
    target = trainer(seed=9).unwrapped_model()
    with Peak() as loading:
        load_model_weights(target, folder / "exported")
    pairs = list(zip(source.parameters(), target.parameters(), strict=True))
    equal = [torch.equal(a.to_local(), b.to_local()) for a, b in pairs]
    whole = sum(parameter.numel() * parameter.element_size() for parameter in target.parameters())
    own = held(target.parameters())
    del source, target, pairs
    return {
        "whole": whole,
        "own": own,
        "largest": VOCABULARY * WIDTH * 4,
        "files": files,
        "equal": all(equal),
        "read": loading.read,
        "peaks": {
            "building": building.extra,
            "save_model": saving_model.extra,
            "export of four files": exporting.extra,
            "loading weights": loading.extra,
        },
    }


def saved(env: DistributedEnvInterface, folder: Path) -> object:
    """Train one step and save, and the same in one process."""
    trainer, sizes = trained(env, folder.parent / "run")
    with Peak() as saving:
        trainer.save_checkpoint()
    barrier(env)
    alone = {}
    if env.rank == 0:
        _, alone = trained(StaticDistributedEnvironment(), folder / "alone")
    barrier(env)
    return {"sizes": sizes, "alone": alone, "peaks": {"saving": saving.extra}}


def resumed(env: DistributedEnvInterface, folder: Path, where: str) -> object:
    """Continue from what another world saved."""
    warm_up(env, folder)
    run = folder.parent.parent / SAVING / "run"
    data = Batches(vocabulary=VOCABULARY)
    # There is nothing left to train: this builds, and loads model and optimizer.
    trainer = trainer_of(env, run, Large, train=data, max_steps=1, construct_model_on=where)
    with Peak() as resuming:
        trainer.train()
    return {"step": trainer.saved_step, "peaks": {"resuming": resuming.extra}}


SAVING = "4"
"""The world that saves what others load."""
SCENARIOS: dict[str, Scenario] = {"measured": measured, "saved": saved}
"""The first one in processes that have held no large model yet, as those that follow."""
RESUMED: dict[str, Scenario] = {"resumed": partial(resumed, where="default")}
RESUMED_ON_META: dict[str, Scenario] = {"resumed": partial(resumed, where="meta")}
