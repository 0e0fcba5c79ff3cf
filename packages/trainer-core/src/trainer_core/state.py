"""What a run is at this moment, and what callbacks may ask of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dist_env import DistributedEnvInterface

from .arguments import TrainingArguments


@dataclass(kw_only=True)
class TrainerState:
    """Where the run stands; callbacks read it, the trainer alone writes it.

    Token counts are totals over all data-parallel ranks and all sessions of the run.
    """

    logging_steps: int
    eval_steps: int
    train_batch_size: int
    max_steps: int
    """Optimizer steps at which the run ends; -1 while that is unknown."""
    num_train_epochs: float
    """Epochs at which the run ends, by whichever limit; -1 while that is unknown."""
    max_eval_steps: int
    save_steps: int = 0
    epoch: float = 0.0
    """Epochs done; the fraction is known only when the length of an epoch is."""
    global_step: int = 0
    """Optimizer steps completed."""
    session_start_step: int = 0
    """`global_step` at which this call of `train` began."""
    raw_epoch: int = 0
    """Epochs completed."""
    epoch_start_step: int = 0
    """`global_step` at which the current epoch began."""
    epoch_data_ended: bool = False
    """Whether the data of the current epoch is known to be used up: its last step had fewer microbatches."""
    epoch_train_steps: int | None = None
    """Optimizer steps per epoch, when known."""
    num_processes: int = 1
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    num_input_tokens_seen: int = 0
    """Non-padding input positions."""
    num_target_tokens_seen: int = 0
    """Positions that counted in the loss."""
    total_flos: float = 0.0
    """Model FLOPs, forward and backward."""
    train_loss_sum: float | None = 0.0
    """Loss of the whole run, summed over what counted in applied steps; None if an old checkpoint lacks
    it."""
    train_loss_count: float = 0.0
    """What counted in it."""
    log_history: list[dict[str, object]] = field(default_factory=list)
    """Every log entry of the run, those of earlier sessions included."""
    best_metric: float | None = None
    """Best value so far of the metric that ranks checkpoints."""
    best_model_checkpoint: str | None = None
    """Directory of the checkpoint with that value."""
    evaluated_step: int = -1
    """Step of the last evaluation of the run's own data."""
    evaluation_pending: bool = False
    """A stop came before the evaluation of this step was done; it is made up for when the run continues."""


@dataclass(kw_only=True)
class TrainerControl:
    """What callbacks ask for; a flag is cleared when it has been served."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False

    def merge(self, other: TrainerControl) -> None:
        """Raise every flag that is raised in `other`."""
        for name in vars(self):
            if getattr(other, name):
                setattr(self, name, True)

    @property
    def ends_run(self) -> bool:
        """Whether somebody asked to stop or to abort."""
        return self.should_training_stop or self.should_abort_without_save


class StopCause(NamedTuple):
    """Who ended the run before its time, and when."""

    name: str
    """Name of the callback, the signal or the setting."""
    event: str
    """The event during which it asked; `signal` or `time limit` for those."""
    aborted: bool
    """Whether it asked to leave without saving."""

    @property
    def resumable(self) -> bool:
        """Whether the run is to continue when it is started again: a signal or the time limit ended it."""
        return self.event in ("signal", "time limit")


class TrainOutput(NamedTuple):
    """What `Trainer.train` returns."""

    global_step: int
    metrics: dict[str, float]


def fresh_state(args: TrainingArguments, env: DistributedEnvInterface) -> TrainerState:
    """The state before the first step."""
    return TrainerState(
        logging_steps=args.logging_steps,
        eval_steps=args.eval_steps,
        save_steps=args.save_steps,
        train_batch_size=args.per_device_train_batch_size,
        max_steps=args.max_steps,
        num_train_epochs=-1 if args.epoch_limit is None else args.epoch_limit,
        max_eval_steps=args.max_eval_steps,
        num_processes=env.world_size,
        is_local_process_zero=env.local_rank == 0,
        is_world_process_zero=env.rank == 0,
    )
