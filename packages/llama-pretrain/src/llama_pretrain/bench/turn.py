"""One turn of one contender in a process of its own: `python -m llama_pretrain.bench.turn NAME ARGS FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from perf_metrics import model_flops_per_token
from trainer_core import arguments_from_dict

from .clock import StepClock, Window
from .contenders import CONTENDERS
from .devices import choose_device, device_name, peak_flops
from .memory import PeakMemory
from .model_shape import model_shape
from .options import BenchArguments
from .work import Work


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn has shown.

    Attributes:
        windows: Seconds of a step, in the order of time.
        peak_memory_bytes: Most memory until the last timed step; None where it cannot be told.
        loss_before: Mean loss of the first batch with the first weights.
        loss_after: The same after all steps.
        flops_per_token: Model FLOPs of training; None if unknown.
        peak_flops: Dense FLOP/s of the device in the dtype of the matrix products; None if unknown.
        device: Name of the device.
        threads: Threads of torch on the CPU.
        versions: Of the libraries of the contender.
    """

    windows: list[Window]
    peak_memory_bytes: int | None
    loss_before: float
    loss_after: float
    flops_per_token: float | None
    peak_flops: float | None
    device: str
    threads: int
    versions: dict[str, str]

    @property
    def step_s(self) -> float:
        """Seconds of a step, the median of the windows."""
        return median(window.wall_s for window in self.windows)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Turn:
        """Read what `asdict` has made of a turn."""
        return cls(**{**values, "windows": [Window(**window) for window in values["windows"]]})


def take_turn(name: str, args: BenchArguments, folder: Path) -> Turn:
    """Train the work of the settings by one contender.

    Args:
        name: The contender; its libraries are installed.
        args: The settings.
        folder: For what it writes.
    """
    contender, config = CONTENDERS[name], model_shape(args)
    train = contender.train()
    device = choose_device(args.use_cpu)
    work = Work.of(config, args, device, folder)
    memory = PeakMemory(device)
    model = work.model()
    before = work.loss(model)
    with StepClock(args.warm_up_steps, args.steps, device, memory) as clock:
        train(work, model)
    after = work.loss(model.to(device))
    return Turn(
        windows=clock.windows(),
        peak_memory_bytes=memory.bytes,
        loss_before=before,
        loss_after=after,
        flops_per_token=model_flops_per_token(model, args.sequence_length),
        peak_flops=peak_flops(device, args.mixed_precision),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions={each: version(each) for each in ("torch", *contender.distributions)},
    )


def main(words: Sequence[str]) -> None:
    """Take a turn, and write what it has shown as JSON.

    Args:
        words: The contender, the settings as JSON, and the file to write, in a folder that nobody else uses.
    """
    name, settings, result = words[0], words[1], Path(words[2])
    turn = take_turn(name, arguments_from_dict(BenchArguments, json.loads(settings)), result.parent)
    result.write_text(json.dumps(asdict(turn)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
