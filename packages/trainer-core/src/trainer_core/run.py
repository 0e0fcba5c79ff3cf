"""Everything that a prepared run is made of, in one place for the loop and its actions."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import CheckpointManager
from perf_metrics import ThroughputMeter

from .arguments import TrainingArguments
from .evaluation import EvaluationData
from .events import CallbackHandler
from .interval import Interval
from .loaders import epoch_of, epoch_progress_of
from .loss import TokenLoss
from .parallelism import Parallelism
from .speed import RunSpeed
from .state import TrainerState


@dataclass(kw_only=True)
class Run:
    """The parts of a run; optimizer, scheduler and loader exist when there is training data."""

    args: TrainingArguments
    state: TrainerState
    events: CallbackHandler
    parallel: Parallelism
    loss: TokenLoss
    meter: ThroughputMeter
    speed: RunSpeed
    interval: Interval
    manager: CheckpointManager
    loader: object | None
    evaluation: EvaluationData | None
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    learning_rate: float = 0.0
    """The rate that the last optimizer step was made with."""
    saved_step: int = -1
    """Step of the newest checkpoint of this run."""

    @property
    def steps_in_epoch(self) -> int:
        """Optimizer steps since the current epoch began."""
        return self.state.global_step - self.state.epoch_start_step

    def update_epoch(self) -> None:
        """Bring `state.epoch` up to date, with its fraction where epoch length or loader tell it."""
        state, epoch = self.state, epoch_of(self.loader)
        state.epoch = float(state.raw_epoch)
        if state.epoch_train_steps:
            state.epoch += self.steps_in_epoch / state.epoch_train_steps
        elif epoch is not None:
            state.epoch = epoch + epoch_progress_of(self.loader)
