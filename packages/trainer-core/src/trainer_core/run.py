"""Everything that a prepared run is made of, in one place for the loop, and its garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import CheckpointManager
from perf_metrics import ThroughputMeter, exclude_compilation

from .arguments import TrainingArguments
from .callbacks import dump_on_oom
from .data.loaders import Batch, EvalMetric, EvaluationSets, epoch_of, epoch_progress_of, loaders_of
from .distributed.ranks import BatchPlacement, Ranks
from .distributed.transforms import BuiltModel
from .loss import TokenLoss
from .memory_tier import kept_in_memory
from .metrics.log_window import FlopsAccount, MetricAccumulator, RunSpeed
from .model import CompileCache, RecompileCounter, run_settings
from .run_state import RunProgress, ScheduleState
from .state import CallbackHandler, TrainerState
from .update import Update

if TYPE_CHECKING:
    from .checkpointing import OutputLease
    from .restarts import Beginning

_GROWTH = 0.05
"""Share of the device's memory by which reserved memory must grow again before the cache is emptied again."""


class GarbagePolicy(AbstractContextManager["GarbagePolicy"]):
    """Collects garbage at chosen steps during a run, and puts everything back at its end.

    Enter it when model, optimizer and loaders exist, so that `gc_freeze` covers them.

    Automatic collection strikes at any time and, among many ranks, at another time on each, so that all wait
    for the slowest one after the other. Collecting by hand makes them pause together.

    Cached device memory is given back when the reserved share of the device exceeds a threshold. A run that
    needs that much at every step would free and reserve it again each time, so after that the cache is left
    alone until reserved memory grows past where it was.

    Args:
        args: gc_steps, gc_freeze and gc_threshold.
        device: Where the model computes; on the CPU there is no cache to give back.
    """

    def __init__(self, args: TrainingArguments, device: torch.device) -> None:
        self._steps = args.gc_steps
        self._freeze = args.gc_freeze
        self._cache = DeviceCache(device, args.gc_threshold) if device.type == "cuda" else None
        self._was_enabled = True
        self._frozen = False

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        if self._steps is not None:
            gc.disable()
        # Objects that somebody else has frozen must stay so: gc can only unfreeze all of them.
        if self._freeze and gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._frozen = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
        if self._steps is not None and self._was_enabled:
            gc.enable()

    def after_step(self, global_step: int) -> None:
        """Collect and give back memory if it is time; waits for the device only when it gives memory back.

        Args:
            global_step: Number of optimizer steps done.
        """
        if self._steps is not None and global_step % self._steps == 0:
            gc.collect()
        self.relieve_device()

    def relieve_device(self) -> None:
        """Give cached device memory back if the threshold is exceeded; call it before an evaluation too."""
        if self._cache is not None:
            self._cache.relieve()


class DeviceCache:
    """The memory that torch keeps of a CUDA device, and the point from which on it gives back what it can.

    Args:
        device: The device.
        threshold: Share of its memory.
    """

    def __init__(self, device: torch.device, threshold: float) -> None:
        self._device = device
        self._total = torch.cuda.get_device_properties(device).total_memory
        self.limit = next_limit(self._total, threshold, reserved=0)
        self._threshold = threshold

    def relieve(self) -> None:
        """Empty the cache if more is reserved than the limit."""
        reserved = _reserved(self._device)
        if reserved > self.limit:
            torch.cuda.empty_cache()
            self.limit = next_limit(self._total, self._threshold, reserved=reserved)


def next_limit(total: int, threshold: float, *, reserved: int) -> float:
    """Bytes above which the cache is emptied, given how much was reserved when it was emptied last."""
    if reserved == 0:
        return threshold * total
    return max(threshold * total, reserved + _GROWTH * total)


def _reserved(device: torch.device) -> int:
    # The flat memory_stats() sorts some hundred entries; this is the same figure from the nested one.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return int(stats["reserved_bytes"]["all"]["current"])


@dataclass(kw_only=True)
class Run:
    """The parts of a run; loader, optimizer and update exist when there is training data."""

    args: TrainingArguments
    state: TrainerState
    events: CallbackHandler
    ranks: Ranks
    built: BuiltModel
    placement: BatchPlacement
    loss: TokenLoss
    meter: ThroughputMeter
    speed: RunSpeed
    log_window: MetricAccumulator
    flops: FlopsAccount
    progress: RunProgress
    manager: CheckpointManager
    lease: OutputLease
    loader: Iterable[Batch] | None
    evaluation: EvaluationSets | None
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    schedule: ScheduleState | None
    """The same, as a part of checkpoints."""
    update: Update | None
    garbage: GarbagePolicy
    recompiles: RecompileCounter
    compile_cache: CompileCache
    eval_metrics: Mapping[str, EvalMetric]
    announced_epoch: int | None = None
    """The epoch that the training data was last told of, if it stands there."""
    loaded: Path | None = None
    """The checkpoint that was loaded last in this process."""
    in_memory: bool = False
    """Whether that one lay in the memory of this job."""
    went_back: bool = False
    """Whether that one was named, so that there may be newer ones."""
    holds_best: bool = False
    """Whether the best weights are in the model, from which training does not continue."""
    has_trained: bool = False
    """Whether a loop has run in this process."""
    evaluated: tuple[int, dict[str, float]] | None = None
    """Step and result of the last evaluation of the run's own data in this process."""
    ranked_step: int = -1
    """Step of the last checkpoint that was saved with the result of an evaluation in this process."""
    begins: Beginning | None = None
    """What it begins from; None in a run that was built without a trainer."""
    lacks_weights: bool = False
    """Whether its weights are those of no checkpoint yet, for which it was built."""
    saved_step: int = -1
    """Step of the newest checkpoint of this run on storage; unknown after one was loaded from memory."""

    @property
    def steps_in_epoch(self) -> float:
        """Optimizer steps since the current epoch began, counted in steps of the size of now."""
        return self.state.global_step - self.state.epoch_start_step

    def shared_with_callbacks(self) -> dict[str, object]:
        """What callbacks are given of the run, by name."""
        return {
            "model": self.built.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.scheduler,
            "train_dataloader": self.loader,
            "eval_dataloader": loaders_of(self.evaluation),
        }

    def update_epoch(self) -> None:
        """Bring `state.epoch` up to date, with its fraction where epoch length or loader tell it."""
        state = self.state
        state.epoch = float(state.raw_epoch)
        if state.epoch_train_steps:
            state.epoch += min(1.0, self.steps_in_epoch / state.epoch_train_steps)
        elif (epoch := epoch_of(self.loader)) is not None and epoch >= state.raw_epoch:
            # A loader whose epoch was left early learns of the next one only when that begins.
            state.epoch = epoch + epoch_progress_of(self.loader)


@contextmanager
def training_switches(run: Run) -> Iterator[None]:
    """What is switched on in the process, or for autograd, while a run trains; all is put back afterwards."""
    args, device = run.args, run.ranks.device
    with ExitStack() as stack:
        stack.enter_context(run_settings(args, device))
        stack.enter_context(run.recompiles)
        stack.enter_context(run.compile_cache)
        if args.torch_compile:
            stack.enter_context(exclude_compilation(run.meter))
        stack.enter_context(run.garbage)
        stack.enter_context(kept_in_memory(run))
        stack.enter_context(dump_on_oom(args.log_path / "memory"))
        yield
