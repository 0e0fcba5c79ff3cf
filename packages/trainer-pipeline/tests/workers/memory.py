"""What a rank needs to build its part of a model of 136 MB."""

from __future__ import annotations

from pathlib import Path

from ranks import Scenario
from tiny import Batches, trainer_of
from torch import Tensor, nn

from dist_env import DistributedEnvInterface

VOCABULARY, WIDTH, LAYERS = 2001, 512, 16


class Layer(nn.Module):
    """Feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, positions, width] to the same shape."""
        return x + self.down((self.up(self.norm(x))).tanh())


class Large(nn.Module):
    """16 layers of 8 MiB, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [rows, positions, vocabulary]."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def status(field: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Peak:
    """The most memory that was in use during a block, beyond what was in use before."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")
        self._resident = status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.extra = status("VmHWM") - self._resident


def measured(env: DistributedEnvInterface, folder: Path) -> object:
    """Build, evaluate, export."""
    small = trainer_of(env, folder / "warm", train=Batches(), evaluate=Batches(), max_steps=1)
    small.train()
    small.evaluate()
    small.save_model(str(folder / "warm" / "exported"))
    trainer = trainer_of(env, folder / "run", Large, evaluate=Batches(8, VOCABULARY))
    with Peak() as building:
        model = trainer.unwrapped_model()
    with Peak() as evaluating:
        trainer.evaluate()
    with Peak() as saving:
        trainer.save_model(str(folder / "exported"))
    numel = sum(parameter.numel() for parameter in model.parameters())
    layer = 8 * WIDTH * WIDTH + 2 * WIDTH
    return {
        "whole": 4 * (VOCABULARY * WIDTH + LAYERS * layer),
        "own": 4 * numel,
        "largest": 4 * VOCABULARY * WIDTH,
        "peaks": {"building": building.extra, "evaluating": evaluating.extra, "saving": saving.extra},
    }


SCENARIOS: dict[str, Scenario] = {"measured": measured}
"""In processes that have held no large model yet."""
