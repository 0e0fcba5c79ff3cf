"""Which parts of a run are saved, and how they are put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import (
    CheckpointConfig,
    CheckpointManager,
    ModelState,
    OptimizerState,
    Preprocessor,
    RNGState,
    StateComponent,
    Stateful,
)
from dist_env import get_logger

from .arguments import TrainingArguments
from .interval import Interval
from .loaders import epoch_of
from .parallelism import Parallelism
from .run import Run
from .state import TrainerState

logger = get_logger(__name__)

_COUNTERS = (
    "global_step",
    "raw_epoch",
    "epoch_start_step",
    "num_input_tokens_seen",
    "num_target_tokens_seen",
    "total_flos",
)


class RunProgress:
    """Step, epoch, totals and the open log interval, as a state component."""

    def __init__(self, state: TrainerState, interval: Interval) -> None:
        self._state = state
        self._interval = interval

    def state_dict(self) -> dict[str, object]:
        """Counters and interval, brought up to date."""
        self._interval.flush()
        counters: dict[str, object] = {name: getattr(self._state, name) for name in _COUNTERS}
        return {**counters, "interval": self._interval.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put the counters back.

        Raises:
            KeyError: If a counter is missing.
        """
        for name in _COUNTERS:
            setattr(self._state, name, state[name])
        interval = state["interval"]
        if isinstance(interval, Mapping):
            self._interval.load_state_dict(interval)


class RunComponents:
    """Tells the checkpoint manager what there is to save; nothing is discovered."""

    def __init__(
        self,
        parallel: Parallelism,
        progress: RunProgress,
        *,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        dataset: object,
    ) -> None:
        self._parallel = parallel
        self._progress = progress
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._dataset = dataset

    def get_state_components(self) -> Sequence[StateComponent]:
        """Model, optimizer, scheduler, trainer, dataset and rng, as far as they exist."""
        model = self._parallel.unwrapped_model()
        parts: dict[str, object] = {"model": ModelState(model)}
        if self._optimizer is not None:
            parts["optimizer"] = OptimizerState(self._optimizer, model)
        if self._scheduler is not None:
            parts["scheduler"] = self._scheduler
        parts["trainer"] = self._progress
        if hasattr(self._dataset, "state_dict"):
            parts["dataset"] = self._dataset
        parts["rng"] = RNGState()
        sharing = self._parallel.sharing()
        return [
            StateComponent(
                key=key, stateful=cast(Stateful, part), sharing_pattern=sharing[key], required=key == "model"
            )
            for key, part in parts.items()
        ]

    def get_process_groups(self) -> Mapping[str, ProcessGroup]:
        """The parallelism's named groups."""
        return self._parallel.process_groups()


def build_manager(
    args: TrainingArguments,
    parallel: Parallelism,
    components: RunComponents,
    preprocessor: Preprocessor | None,
) -> CheckpointManager:
    """The manager of a run's checkpoints in its output directory."""
    config = CheckpointConfig(output_dir=args.output_dir, save_total_limit=args.save_total_limit)
    return CheckpointManager(
        config, dist=parallel.env, stateful_provider=components, preprocessor=preprocessor
    )


def resume(run: Run) -> None:
    """Load the checkpoint that `resume_from_checkpoint` asks for, if there is one.

    Raises:
        checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it.
    """
    wanted = run.args.resume_from_checkpoint
    if wanted is False:
        return
    loaded = run.manager.load_checkpoint(None if wanted is True else wanted)
    if loaded is None:
        return
    run.saved_step = run.state.global_step
    _follow_loader(run)
    run.update_epoch()
    logger.info("resumed from %s at step %d", loaded.path, run.state.global_step)


def _follow_loader(run: Run) -> None:
    """A checkpoint of an epoch's last step may hold a loader that has already turned to the next epoch."""
    epoch = epoch_of(run.loader)
    if epoch is not None and epoch > run.state.raw_epoch:
        run.state.raw_epoch = epoch
        run.state.epoch_start_step = run.state.global_step
