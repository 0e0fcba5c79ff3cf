"""What a device does under the runs of `verify`: saves, waits of the host, time, memory, utilization."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoint_core import CheckpointConfig, CheckpointManager
from dist_env import StaticDistributedEnvironment
from perf_metrics import FlopsUnknownError, OFUSampler, device_peak_flops, model_flops_per_token

from .runs import Runs, state_bytes

_STAGED_BYTES = {"cpu": 16 << 20}
_STAGED_ON_ACCELERATOR = 256 << 20
_SETS_UP = 2
"""Steps at the beginning that set up what later ones use, and may wait for it."""
_TIMED_STEPS, _TIMED_ROUNDS = 10, 3
_ABOVE_PLAN = 1.15
_KEPT_BY_LIBRARIES = 64 << 20
"""What the matrix products of a device keep for themselves, in bytes; the dry run does not count it."""
_MATMUL_SECONDS, _OFU_APART = 4.0, 0.1


class NotPossibleError(Exception):
    """Why something cannot be looked at here."""


@dataclass(frozen=True)
class Outcome:
    """What came of a check; see `VerificationCheck`."""

    passed: bool | None
    found: str
    rule: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class StagedSave:
    """An asynchronous save.

    Attributes:
        bytes: What was saved.
        blocked_seconds: How long the program was held up.
        seconds: How long until it was on the disk.
        wrong: What is wrong with the values that were loaded; empty if nothing.
    """

    bytes: int
    blocked_seconds: float
    seconds: float
    wrong: str


def save_while_changing(device: torch.device, directory: Path) -> StagedSave:
    """Save weights asynchronously, change them at once, as a step would, and load what was saved.

    Args:
        device: Where the weights are.
        directory: A new directory.
    """
    size = _STAGED_BYTES.get(device.type, _STAGED_ON_ACCELERATOR)
    model = nn.Linear(size // 4 // 1024, 1024, bias=False, device=device)
    weight = model.weight.detach()
    config = CheckpointConfig(output_dir=directory, async_save=True)
    with CheckpointManager(
        config, {"model": model}, dist=StaticDistributedEnvironment(device=device)
    ) as kept:
        for step in (1, 2):  # the second save uses the buffer that the first one has made
            weight.fill_(float(step))
            _finish(device)
            began = time.perf_counter()
            kept.save_checkpoint(step)
            blocked = time.perf_counter() - began
            weight.fill_(-1.0)
            kept.wait()
            seconds = time.perf_counter() - began
        kept.load_checkpoint()
    loaded = float(weight.min()), float(weight.max())
    wrong = "" if loaded == (2.0, 2.0) else f"the save of weights of 2.0 holds {loaded[0]} to {loaded[1]}"
    return StagedSave(weight.nbytes, blocked, seconds, wrong)


class _WaitsByStep:
    """A callback that collects, from torch's own warnings, where the host waited behind the first steps."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self._seen: list[warnings.WarningMessage] = []
        self._step = 0

    def on_step_end(self, *_: object, **__: object) -> None:
        self._step += 1
        if self._step > _SETS_UP:
            self.late += [f"{Path(each.filename).name}:{each.lineno}" for each in self._seen]
        self._seen.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which torch warns of each operator for which the host waits."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self._seen = seen
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)


def count_waits(runs: Runs, place: str) -> list[str]:
    """Where the host waited for the device in steps without a log entry: `file.py:line` for each time.

    torch tells of operators that wait, such as `item` and copies to the host, not of explicit `synchronize`.

    Raises:
        NotPossibleError: Without CUDA.
    """
    device = runs.env.device
    if device.type != "cuda":
        raise NotPossibleError(f"the host waits for each operator of the {device.type.upper()}")
    watch = _WaitsByStep()
    trainer = runs.trainer(runs.alone, place, watch, logging_steps=1000)
    with watch.watching():
        trainer.train()
    return watch.late


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimizer step, the median of the best round.

    Attributes:
        seconds: Of the trainer.
        plain_seconds: Of a loop of plain torch.
        mfu: Model FLOPs utilization of the trainer's step; None where the peak of the device is not known.
    """

    seconds: float
    plain_seconds: float
    mfu: float | None


class _StepClock:
    """A callback that notes when steps end, with the device behind them."""

    def __init__(self, device: torch.device) -> None:
        self.ends: list[float] = []
        self._device = device

    def on_step_end(self, *_: object, **__: object) -> None:
        _finish(self._device)
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        """Median seconds of the steps behind the first ones."""
        return statistics.median(b - a for a, b in list(pairwise(self.ends))[_SETS_UP:])


def times(runs: Runs, place: str) -> StepTimes:
    """Time steps of the trainer and of a loop of plain torch in turn, on this rank's device."""
    device, ours, plain = runs.env.device, [], []
    for turn in range(_TIMED_ROUNDS):
        clock = _StepClock(device)
        length = {"max_steps": _TIMED_STEPS + _SETS_UP, "logging_steps": 1000}
        trainer = runs.trainer(runs.alone, f"{place}-{turn}", clock, **length)
        trainer.train()
        ours.append(clock.median())
        plain.append(_plain_step(runs, device))
    seconds = min(ours)
    rows = [row["input_ids"] for row in runs.rows[: runs.batch_size]]
    flops = None
    with suppress(FlopsUnknownError):
        flops = model_flops_per_token(trainer.meta_model(), rows[0].numel())
    peak = None if device.type == "cpu" else device_peak_flops("fp32")
    mfu = None
    if flops is not None and peak is not None:
        mfu = flops * sum(row.numel() for row in rows) / seconds / peak
    return StepTimes(seconds, min(plain), mfu)


def _plain_step(runs: Runs, device: torch.device) -> float:
    """Median seconds of a step that does the same, written down with torch alone."""
    torch.manual_seed(7)
    model = runs.model_init().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = runs.rows[: runs.batch_size]
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    clock = _StepClock(device)
    for _ in range(_TIMED_STEPS + _SETS_UP):
        output = model(ids.to(device, non_blocking=True))
        logits = output if isinstance(output, Tensor) else output.logits
        targets = labels.to(device, non_blocking=True)[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    return clock.median()


class _PeakByStep:
    """A callback that reads the peak behind each step, before a log entry resets it."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = 0
        self._device = device

    def on_step_end(self, *_: object, **__: object) -> None:
        self.bytes = max(self.bytes, torch.accelerator.max_memory_allocated(self._device))


def state_and_peak(runs: Runs, place: str) -> Outcome:
    """Hold what a rank alone holds of its state, and the peak of a step, against the dry run.

    The peak is known on accelerators only.
    """
    planned = runs.trainer(runs.on_cpu, f"{place}-planned").dry_run(memory_only=True)
    device = runs.env.device
    if device.type != "cpu":
        # Trainers of earlier checks are cycles: freed under way, they would make the peak look smaller.
        gc.collect()
        torch.accelerator.empty_cache()
        before = torch.accelerator.memory_allocated(device)
    watch = _PeakByStep(device)
    trainer = runs.trainer(runs.alone, place, *(() if device.type == "cpu" else (watch,)))
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    trainer.train()
    state, expected = state_bytes(trainer), planned.weights + planned.gradients + planned.optimizer
    figures: dict[str, object] = {"state_bytes": state, "planned_state_bytes": expected}
    found, rule, passed = (
        f"state {_mib(state)}, planned {_mib(expected)}",
        "state as planned",
        state == expected,
    )
    if device.type != "cpu" and planned.memory is not None:
        peak = watch.bytes - before
        total = planned.memory.total
        figures |= {"peak_bytes": peak, "planned_peak_bytes": total}
        found += f"; peak {_mib(peak)}, planned {_mib(total)}"
        rule += f", peak at most {_ABOVE_PLAN - 1:.0%} and {_mib(_KEPT_BY_LIBRARIES)} above the plan"
        passed = passed and peak <= _ABOVE_PLAN * total + _KEPT_BY_LIBRARIES
    return Outcome(passed, found, rule, figures)


def check_compiles(device: torch.device) -> None:
    """Refuse what `torch.compile` cannot make kernels for.

    Raises:
        NotPossibleError: Of a GPU without Triton.
    """
    if device.type == "cuda" and find_spec("triton") is None:
        raise NotPossibleError("torch.compile makes kernels of GPUs by Triton, which is not installed")


def ofu_of_matmul(device: torch.device) -> Outcome:
    """Hold the OFU that counters give against the FLOP/s of a large matrix product.

    Raises:
        NotPossibleError: If this device has no counters that can be read, or its peak is not known.
    """
    peak = device_peak_flops("bf16") if device.type == "cuda" else None
    if peak is None:
        raise NotPossibleError("only GPUs in the hardware table have tensor cores whose use is counted")
    identifier = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    sampler = OFUSampler([identifier], interval_s=0.25)
    try:
        sampler.start()
    except ModuleNotFoundError as error:
        raise NotPossibleError(str(error)) from error
    if sampler.problem is not None:
        sampler.stop()
        raise NotPossibleError(sampler.problem)
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    try:
        products, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < _MATMUL_SECONDS:
            for _ in range(10):
                left @ right
            _finish(device)
            products += 10
        window = sampler.window()
    finally:
        sampler.stop()
    if window.ofu is None:
        raise NotPossibleError("; ".join(window.reasons))
    rate = products * 2 * size**3 / seconds / peak
    figures = {"ofu": window.ofu, "matmul_share_of_peak": rate}
    found = f"OFU {window.ofu:.1%}, matrix products {rate:.1%} of the peak"
    return Outcome(abs(window.ofu - rate) <= _OFU_APART, found, f"at most {_OFU_APART:.0%} apart", figures)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
