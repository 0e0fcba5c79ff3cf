"""A trial of one baseline in a process of its own.

It is run as `python -m llama_pretrain.bench.trial NAME ARGS FILE BEGAN`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from perf_metrics import device_peak_flops, model_flops_per_token
from trainer_core import arguments_from_dict

from ..commands.arguments import LOG_EVERY, BenchArguments
from ..model.config import preset_or_load
from .baselines import BASELINES, Work

_CPU_INFO = Path("/proc/cpuinfo")


def choose_device(use_cpu: bool) -> torch.device:
    """The first accelerator, or the CPU if there is none or it is asked for."""
    found = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def device_name(device: torch.device) -> str:
    """What its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def peak_flops(device: torch.device, mixed_precision: str) -> float | None:
    """Dense FLOP/s in the dtype of the matrix products; None if unknown.

    On the CPU of a machine with an accelerator too: the table would tell that one's.
    """
    if device.type == "cpu" and torch.accelerator.is_available():
        return None
    return device_peak_flops("bf16" if mixed_precision == "bf16" else "fp32")


_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_ALLOCATED = "allocated_bytes.all.peak"


class PeakMemory:
    """Highest memory between its making and `stop`: weights, gradients, optimizer, activations.

    On an accelerator what its allocator has handed out to tensors. On the CPU resident memory above that at
    the beginning, which Linux keeps as a maximum; other systems do not tell.

    Args:
        device: Where it trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes: int | None = None
        """Known after `stop`; None where it cannot be told."""
        self._device = device
        self._before = 0
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device)
        elif _CLEAR_REFS.exists():
            _load_what_a_step_loads()
            _give_back_freed_memory()
            _CLEAR_REFS.write_text("5", encoding="ascii")
            self._before = _resident("VmRSS")

    def stop(self) -> None:
        """Read the maximum."""
        if self._device.type != "cpu":
            self.bytes = torch.accelerator.memory_stats(self._device).get(_ALLOCATED)
        elif _CLEAR_REFS.exists():
            self.bytes = _resident("VmHWM") - self._before


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no field {field}")


def _load_what_a_step_loads() -> None:
    """torch loads a part of itself in the first step; some libraries have loaded that already."""
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()


def _give_back_freed_memory() -> None:
    """Otherwise what imports have freed is used again unseen, and a larger library seems to save memory."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class Window:
    """Mean seconds per step of consecutive steps.

    Attributes:
        wall_s: On the clock.
        cpu_s: Of processors, of all threads of the process together.
    """

    wall_s: float
    cpu_s: float


class StepClock:
    """Counts steps of all optimizers of this process, and times windows of steps after the warm-up.

    The device is waited for at the ends of windows only, so that it may run behind within them. A window is
    as long as baselines go without a log entry, for which they wait as well.

    Args:
        warm_up: Steps before the first window.
        steps: Steps of all windows, a multiple of `LOG_EVERY`.
        device: Where the steps are computed.
        memory: Its measurement ends with the last window.
    """

    def __init__(self, warm_up: int, steps: int, device: torch.device, memory: PeakMemory) -> None:
        self.count = 0
        """Steps so far."""
        self._first, self._last = warm_up, warm_up + steps
        self._device, self._memory = device, memory
        self._times: list[tuple[float, float]] = []

    def __enter__(self) -> StepClock:
        """Begin to count."""
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop counting."""
        self._hook.remove()

    def windows(self) -> list[Window]:
        """What was measured, oldest first.

        Raises:
            RuntimeError: The baseline made another number of steps than it was told to.
        """
        if self.count != self._last:
            raise RuntimeError(f"made {self.count} optimizer steps, not {self._last}.")
        return [
            Window((later[0] - earlier[0]) / LOG_EVERY, (later[1] - earlier[1]) / LOG_EVERY)
            for earlier, later in pairwise(self._times)
        ]

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.count += 1
        if self._first <= self.count <= self._last and (self.count - self._first) % LOG_EVERY == 0:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self._times.append((time.perf_counter(), time.process_time()))
        if self.count == self._last:
            self._memory.stop()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one trial has shown.

    Attributes:
        windows: Seconds of a step, in the order of time.
        peak_memory_bytes: Most memory until the last timed step; None where it cannot be told.
        loss_before: Mean loss of the first batch with the first weights.
        loss_after: The same after all steps.
        flops_per_token: Model FLOPs of training; None if unknown.
        peak_flops: Dense FLOP/s of the device in the dtype of the matrix products; None if unknown.
        device: Name of the device.
        threads: Threads of torch on the CPU.
        versions: Of the libraries of the baseline.
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
    def from_json(cls, values: dict[str, Any]) -> Trial:
        """Read what `asdict` has made of a trial."""
        return cls(**{**values, "windows": [Window(**window) for window in values["windows"]]})


def run_trial(name: str, args: BenchArguments, folder: Path) -> Trial:
    """Train the work of the settings by one baseline.

    Args:
        name: The baseline; its libraries are installed.
        args: The settings.
        folder: For what it writes.
    """
    baseline, config = BASELINES[name], preset_or_load(args.model, args.sequence_length)
    train = baseline.load()
    device = choose_device(args.use_cpu)
    work = Work.of(config, args, device, folder)
    memory = PeakMemory(device)
    model = work.model()
    before = work.loss(model)
    with StepClock(args.warm_up_steps, args.steps, device, memory) as clock:
        train(work, model)
    after = work.loss(model.to(device))
    return Trial(
        windows=clock.windows(),
        peak_memory_bytes=memory.bytes,
        loss_before=before,
        loss_after=after,
        flops_per_token=model_flops_per_token(model, args.sequence_length),
        peak_flops=peak_flops(device, args.mixed_precision),
        device=device_name(device),
        threads=torch.get_num_threads(),
        versions={each: version(each) for each in ("torch", *baseline.distributions)},
    )


def main(words: Sequence[str]) -> None:
    """Run a trial, and write what it has shown as JSON.

    Args:
        words: The baseline, the settings as JSON, the file to write, in a folder that nobody else uses, and
            when the process was started, in seconds since the epoch.
    """
    name, settings, result, began = words[0], words[1], Path(words[2]), float(words[3])
    args = arguments_from_dict(BenchArguments, json.loads(settings))
    if args.to_loss is None:
        told = asdict(run_trial(name, args, result.parent))
    else:
        from .to_loss import run_to_loss  # which uses this module

        told = asdict(run_to_loss(name, args, result.parent, began))
    result.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
