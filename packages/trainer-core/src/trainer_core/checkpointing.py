"""Which parts of a run are saved, and how they are put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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
    find_latest_checkpoint,
)
from dist_env import get_logger

from .arguments import TrainingArguments
from .errors import ConfigurationError
from .interval import Interval
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

    def __init__(self, state: TrainerState, interval: Interval, samples_per_step: int) -> None:
        self._state = state
        self._interval = interval
        self._samples_per_step = samples_per_step

    def state_dict(self) -> dict[str, object]:
        """Counters and interval, brought up to date."""
        self._interval.flush()
        counters: dict[str, object] = {name: getattr(self._state, name) for name in _COUNTERS}
        interval = self._interval.state_dict()
        return {**counters, "samples_per_step": self._samples_per_step, "interval": interval}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put the counters back.

        Raises:
            ConfigurationError: If epochs limit the run and its steps have another size now.
            KeyError: If a counter is missing.
        """
        before = state["samples_per_step"]
        if (
            before != self._samples_per_step
            and self._state.epoch_train_steps
            and self._state.num_train_epochs >= 0
        ):
            raise ConfigurationError(
                "per_device_train_batch_size",
                f"{self._samples_per_step} examples a step with accumulation and ranks",
                f"the checkpoint counts its epochs in steps of {before} examples",
                "go back to that number, or limit the run by max_steps with num_train_epochs=-1",
            )
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
        ConfigurationError: If the output directory holds checkpoints that this run would not continue.
        checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it.
    """
    wanted = run.args.resume_from_checkpoint
    loaded = None if wanted is False else load(run, None if wanted is True else wanted)
    output_dir = Path(run.args.output_dir).absolute()
    continues = loaded is not None and loaded.parent == output_dir
    if run.args.save_strategy == "no" or continues:
        return
    other = find_latest_checkpoint(output_dir)
    if other is not None:
        raise ConfigurationError(
            "resume_from_checkpoint",
            wanted,
            f"starts another run beside {other}, whose place its own checkpoints would need",
            "choose another output_dir, or remove the checkpoints there",
        )


def load(run: Run, path: str | None) -> Path | None:
    """Load a checkpoint, the newest in the output directory when no path is given.

    Returns:
        The checkpoint; None if there is none.

    Raises:
        checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it, or its
            state does not fit this run.
    """
    loaded = run.manager.load_checkpoint(path)
    if loaded is None:
        return None
    run.saved_step = run.state.global_step
    run.update_epoch()
    if run.loader is not None and not hasattr(run.loader, "state_dict"):
        logger.warning(
            "the training loader (%s) keeps no position: its epoch begins anew, so data will repeat",
            type(run.loader).__name__,
        )
    logger.info("resumed from %s at step %d", loaded.path, run.state.global_step)
    return loaded.path
