"""Which parts of a run are saved, and what a resume does with options that have changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

from torch import Tensor, optim
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import ModelState, OptimizerState, RNGState, SharingPattern, StateComponent, Stateful
from dataloader_dispatch import load_loader_state, loader_state
from dist_env import get_logger

from .arguments import TrainingArguments
from .arguments.config import Changes, compare, compare_model_configs, plain_arguments
from .arguments.minimal import GUARDED
from .data.loaders import Batch, is_torchdata, keeps_position
from .distributed.ranks import BatchPlacement
from .distributed.transforms import BuiltModel
from .errors import ConfigurationError
from .metrics.log_window import MetricAccumulator, RunSpeed
from .optimization import OptimizerFacade
from .optimization.averaging import TRAINING_WEIGHTS
from .optimization.schedules import FactorSchedule
from .state import CallbackHandler, TrainerState, callback_name

logger = get_logger(__name__)


class ScheduleState:
    """Saves the schedule, and leaves alone what a schedule of another kind has saved.

    Args:
        scheduler: The schedule of this run.
    """

    def __init__(self, scheduler: optim.lr_scheduler.LRScheduler) -> None:
        self.scheduler = scheduler
        self.loaded = False
        """Whether it took up the state of a checkpoint."""

    def state_dict(self) -> dict[str, object]:
        """The state, and what kind of schedule it is of."""
        return {"kind": type(self.scheduler).__name__, "state": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put the schedule where the saved one was, if it is of the same kind."""
        self.loaded = state["kind"] == type(self.scheduler).__name__
        if self.loaded:
            # As it was saved: it may be of any type that the schedule chose.
            self.scheduler.load_state_dict(cast(dict[str, object], state["state"]))

    def go_to_step(self, step: int) -> None:
        """Set the schedule, and the rates that it drives, to where it is after so many optimizer steps."""
        kind = type(self.scheduler).__name__
        logger.info("the checkpoint has no state of a %s: it begins at step %d", kind, step)
        self.scheduler.last_epoch = step - 1
        self.scheduler.step()


_COPIES = (SharingPattern.REPLICATED, SharingPattern.PER_GROUP)
_COUNTERS = (
    "global_step",
    "raw_epoch",
    "epoch_start_step",
    "num_input_tokens_seen",
    "num_target_tokens_seen",
    "total_flos",
    "evaluation_pending",
    "evaluated_step",
    "log_history",
)


class RunProgress:
    """Step, epoch, totals, log, arguments and the open log interval, as a state component."""

    def __init__(
        self,
        args: TrainingArguments,
        state: TrainerState,
        log_window: MetricAccumulator,
        speed: RunSpeed,
        options: Hyperparameters | None,
        model_config: Mapping[str, object] | None = None,
    ) -> None:
        self.changes = Changes((), (), ())
        """How the arguments differ from those of the checkpoint that was loaded."""
        self.loaded = False
        """Whether the counters came from a checkpoint."""
        self.generators_before_epoch: dict[str, object] | None = None
        """Random generators as they were before the loader began the epoch, until its first step is made."""
        self.refusal: ConfigurationError | None = None
        """Why the checkpoint was refused, if it was."""
        self._options = options
        self._options_before: Sequence[Mapping[str, object]] | None = None
        self._args = args
        self._model_config = model_config
        self._state = state
        self._log_window = log_window
        self._speed = speed
        self._samples_per_step = speed.samples_per_step
        self._finished: dict[str, float] | None = None

    def final_metrics(self) -> dict[str, float]:
        """Figures of this session; if it has made no step, those of the last one that did, where known."""
        if self._finished is None or self._state.global_step > self._state.session_start_step:
            self._finished = self._speed.summary(self._state)
        return dict(self._finished)

    def state_dict(self) -> dict[str, object]:
        """Counters and interval, brought up to date."""
        self._log_window.flush()
        counters: dict[str, object] = {name: getattr(self._state, name) for name in _COUNTERS}
        log_window = self._log_window.state_dict()
        return {
            **counters,
            "epoch_data_ended": self._state.epoch_data_ended,
            "train_loss": [self._state.train_loss_sum, self._state.train_loss_count],
            "metrics": self.final_metrics(),
            "samples_per_step": self._samples_per_step,
            "interval": log_window,
            "arguments": plain_arguments(self._args),
            "model_config": self._model_config,
            "optimizer": None if self._options is None else self._options.kind,
            "optimizer_options": None if self._options is None else self._options.plain(),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put the counters back.

        Raises:
            ConfigurationError: If epochs limit the run and its steps have another size now.
            KeyError: If a counter is missing.
        """
        arguments = state["arguments"]
        if isinstance(arguments, Mapping):
            batch = (state["samples_per_step"], self._samples_per_step)
            self.changes = compare(arguments, self._args, batch=batch)
        # Absent from old checkpoints. The weights of another configuration may fit, such as other heads.
        model_config = state.get("model_config")
        if isinstance(model_config, Mapping) and self._model_config is not None:
            others = compare_model_configs(model_config, self._model_config)
            self.changes = self.changes._replace(warned=(*self.changes.warned, *others))
        before = state["optimizer_options"]
        self._options_before = None
        if isinstance(before, Sequence):
            self._options_before = [_table(each, "options of the optimizer") for each in before]
        self.refusal = self._refusal(state["samples_per_step"], state["optimizer"])
        if self.refusal is not None:
            raise self.refusal
        for name in _COUNTERS:
            setattr(self._state, name, state[name])
        self._count_epoch_in_own_steps(state["samples_per_step"])
        # The next three are absent from old checkpoints.
        self._state.epoch_data_ended = bool(state.get("epoch_data_ended"))
        loss, metrics = state.get("train_loss"), state.get("metrics")
        self._state.train_loss_sum, self._state.train_loss_count = (
            loss if isinstance(loss, Sequence) else (None, 0.0)
        )
        self._finished = dict(metrics) if isinstance(metrics, Mapping) else None
        self.loaded = True
        log_window = state["interval"]
        if isinstance(log_window, Mapping):
            self._log_window.load_state_dict(log_window)

    def _count_epoch_in_own_steps(self, samples_before: object) -> None:
        """Let the epoch have begun as many steps ago as its examples would have made of the size of now."""
        if isinstance(samples_before, int) and samples_before != self._samples_per_step:
            done = self._state.global_step - self._state.epoch_start_step
            # Rounded, so that whole steps come to a whole number after several such resumes, too.
            own = round(done * samples_before / self._samples_per_step, 6)
            self._state.epoch_start_step = self._state.global_step - own

    def settle(self, schedule: ScheduleState | None, *, fresh_optimizer: bool) -> None:
        """Let what the user has changed about optimizer and schedule win over what was restored, and say so.

        Args:
            schedule: The schedule of this run, after loading.
            fresh_optimizer: Whether the checkpoint had no state for the optimizer.
        """
        if self._options is None or self._options_before is None:
            return
        self._options.complete()
        if fresh_optimizer and schedule is not None and schedule.loaded:
            self._options.rates_of(schedule.scheduler)
        if changes := self._options.changes(self._options_before):
            logger.warning("changed since the checkpoint, and in force from here on: %s", "; ".join(changes))
            self._options.reassert(self._options_before, None if schedule is None else schedule.scheduler)
        if schedule is None and any(change.name == "lr_scheduler_type" for change in self.changes.warned):
            self._options.rates_as_built()
        if schedule is not None and not schedule.loaded:
            self._options.rates_as_built()
            schedule.go_to_step(self._state.global_step)
        scheduler = None if schedule is None else schedule.scheduler
        if isinstance(scheduler, FactorSchedule) and scheduler.differs:
            scheduler.apply()  # the saved rates are those of the schedule before

    def _refusal(self, samples_before: object, optimizer_before: object) -> ConfigurationError | None:
        """What stands against going on from the checkpoint; nothing, if this run does not train."""
        if self._options is None:
            return None
        for change in self.changes.refused:
            return ConfigurationError(
                change.name,
                change.now,
                f"was {change.before!r} when the checkpoint was saved, and the state of the checkpoint is "
                "valid only with that",
                f"go back to {change.before!r}, or start anew with resume_from_checkpoint=False in another "
                "output_dir",
            )
        if optimizer_before not in (None, self._options.kind):
            return ConfigurationError(
                "optimizer",
                self._options.kind,
                f"cannot load the optimizer state of the checkpoint, which was saved with {optimizer_before}",
                "go back to that optimizer, or start from the checkpoint's weights in another output_dir",
            )
        allowed = self._args.allow_changes
        guarded = [each for each in self.changes.warned if each.name in GUARDED and each.name not in allowed]
        for change in guarded:
            names = (*allowed, *(each.name for each in guarded))
            return ConfigurationError(
                change.name,
                change.now,
                f"was {change.before!r} when the checkpoint was saved, and the curve would change",
                f"go back to {change.before!r}, or set allow_changes={names!r} to use the new value",
            )
        counts_epochs = self._state.epoch_train_steps and self._args.epoch_limit is not None
        if counts_epochs and samples_before != self._samples_per_step:
            return ConfigurationError(
                "per_device_train_batch_size",
                f"{self._samples_per_step} examples a step with accumulation and ranks",
                f"contradicts the checkpoint, which counts its epochs in steps of {samples_before} examples",
                "go back to that number, or limit the run by max_steps without num_train_epochs",
            )
        return None


class CallbackStates:
    """The states of the callbacks that keep one, by their names."""

    def __init__(self, events: CallbackHandler) -> None:
        self._events = events

    def state_dict(self) -> dict[str, object]:
        """State of every callback with `state_dict` and `load_state_dict`; equal names are numbered."""
        return {name: callback.state_dict() for name, callback in self._keepers().items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Give each callback its state; one that was not there when it was saved begins anew."""
        for name, callback in self._keepers().items():
            if name in state:
                callback.load_state_dict(cast(dict[str, object], state[name]))
            else:
                logger.info("the checkpoint has no state of the callback %s, which begins anew", name)
        if left := sorted(state.keys() - self._keepers().keys()):
            logger.warning("the checkpoint has state of callbacks that this run lacks: %s", ", ".join(left))

    def _keepers(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {}
        for callback in self._events.callbacks:
            # A learning-rate schedule may be a callback too, and is saved as what it is.
            if isinstance(callback, optim.lr_scheduler.LRScheduler) or not _keeps_state(callback):
                continue
            name = callback_name(callback)
            same = sum(key == name or key.startswith(f"{name}#") for key in found)
            found[f"{name}#{same + 1}" if same else name] = callback
        return found


def _keeps_state(callback: object) -> TypeGuard[Stateful]:
    return hasattr(callback, "load_state_dict")


def _table(saved: object, what: str) -> dict[str, object]:
    if not isinstance(saved, Mapping):
        raise TypeError(f"the checkpoint has no {what}, but a {type(saved).__name__}. Load another one.")
    return dict(saved)


class _Generators(RNGState):
    """The random generators; before the first step of an epoch as they were when its pass began."""

    def __init__(self, progress: RunProgress) -> None:
        super().__init__()
        self._progress = progress

    def state_dict(self) -> dict[str, object]:
        before = self._progress.generators_before_epoch
        return super().state_dict() if before is None else before


class _TorchdataPosition:
    """The position of a torchdata loader; asking for it draws no random number."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, object]:
        """The loader's state; empty where nothing has been loaded or iterated, which would begin a pass."""
        loader = self._loader
        if loader._iterator is None and loader.next_iter_state is None:
            return {}
        generators = RNGState()
        before = generators.state_dict()
        state: dict[str, object] = loader_state(loader)
        generators.load_state_dict(before)
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position; torchdata takes an empty one for none."""
        load_loader_state(self._loader, dict(state))


def _sharing(built: BuiltModel, placement: BatchPlacement) -> dict[str, SharingPattern]:
    """What is equal on all ranks, lies on them in parts, or is each rank's own."""
    several = built.ranks.several
    equal = SharingPattern.REPLICATED if several else SharingPattern.GLOBAL
    parts = SharingPattern.SHARDED if built.is_partial else equal
    read = SharingPattern.GLOBAL if placement.is_dispatched else SharingPattern.PER_RANK
    keys = ("scheduler", "grad_scaler", "callbacks", "trainer")
    return {
        **dict.fromkeys(keys, equal),
        "model": parts,
        TRAINING_WEIGHTS: parts,
        "optimizer": parts,
        "dataset": read,
        "rng": SharingPattern.PER_RANK,
    }


class RunComponents:
    """Tells the checkpoint manager what there is to save; nothing is discovered."""

    def __init__(
        self,
        built: BuiltModel,
        placement: BatchPlacement,
        progress: RunProgress,
        *,
        callbacks: CallbackStates,
        optimizer: optim.Optimizer | None,
        schedule: ScheduleState | None,
        scaler: Stateful | None,
        dataset: Iterable[Batch] | None,
        further: Sequence[StateComponent] = (),
    ) -> None:
        self._further = further
        self._built = built
        self.progress = progress
        self._optimizer = optimizer
        self._rest: dict[str, Stateful | None] = {
            "scheduler": schedule,
            "grad_scaler": scaler,
            "callbacks": callbacks,
        }
        self._dataset = dataset
        self._sharing = _sharing(built, placement)

    def get_state_components(self) -> Sequence[StateComponent]:
        """The components of the run, as far as they exist."""
        model = self._built.model
        # The trainer's own comes first: it refuses a checkpoint before anything else has changed.
        parts: dict[str, Stateful] = {"trainer": self.progress, "model": ModelState(model)}
        if self._optimizer is not None:
            parts["optimizer"] = OptimizerState(self._optimizer, model)
        if self._built.average is not None:
            parts[TRAINING_WEIGHTS] = self._built.average.component
        parts |= {key: part for key, part in self._rest.items() if part is not None}
        if keeps_position(self._dataset):
            data = self._dataset
            parts["dataset"] = _TorchdataPosition(data) if is_torchdata(data) else data
        parts["rng"] = _Generators(self.progress)
        components = [
            StateComponent(
                key=key,
                stateful=part,
                sharing_pattern=self._sharing[key],
                required=key == "model",
                # The trainer's own holds times, which each rank measures for itself.
                validate_replication=key in ("model", TRAINING_WEIGHTS, "optimizer")
                and self._sharing[key] in _COPIES,
            )
            for key, part in parts.items()
        ]
        return [*components, *self._built.state_components(), *self._further]

    def get_process_groups(self) -> dict[str, Any]:
        """None: no component is shared by a named group."""
        return {}


Options = dict[str, object]
# Positions and names; how a step is computed; the rate of this moment, which `initial_lr` stands for; and
# what schedulefree counts in its groups.
_LEFT_OUT = frozenset(
    {
        "params",
        "param_names",
        "lr",
        "fused",
        "foreach",
        "capturable",
        "differentiable",
        "decoupled_weight_decay",
        "k",
        "lr_max",
        "scheduled_lr",
        "train_mode",
        "weight_sum",
    }
)


class Hyperparameters:
    """Tells options that the user has changed since a checkpoint from those that changed in the run.

    A checkpoint holds the options of its moment, which a schedule or a callback may have moved; they are
    restored. Options that the optimizer was built with differently are the user's wish, and win.

    Args:
        optimizer: Just built, with its schedule.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._built = [_options(group) for group in optimizer.param_groups]

    def plain(self) -> list[Options]:
        """The options that the optimizer was built with, as JSON values, for a checkpoint."""
        return [{name: _plain(value) for name, value in options.items()} for options in self._built]

    def changes(self, before: Sequence[Mapping[str, object]]) -> list[str]:
        """Say what differs from the options that a checkpoint's optimizer was built with.

        Args:
            before: What `plain` gave then.
        """
        now = self.plain()
        if len(before) != len(now):
            return [f"{len(before)} optimizer groups before, {len(now)} now"]
        return [
            f"{name} of optimizer group {number}: {old.get(name)!r} before, {new.get(name)!r} now"
            for number, (old, new, names) in enumerate(zip(before, now, self._changed(before), strict=True))
            for name in sorted(names)
        ]

    @property
    def kind(self) -> str:
        """What holds the state: the class of the optimizer, or the classes of several."""
        return optimizer_kind(self._optimizer)

    def complete(self) -> None:
        """Give the groups their `initial_lr` again, which a checkpoint without a schedule does not have."""
        for group, built in zip(self._optimizer.param_groups, self._built, strict=True):
            group.setdefault("initial_lr", built["initial_lr"])

    def rates_as_built(self) -> None:
        """Put the learning rates back to those that the optimizer was built with."""
        for group, built in zip(self._optimizer.param_groups, self._built, strict=True):
            group["lr"] = built["initial_lr"]

    def rates_of(self, scheduler: LRScheduler) -> None:
        """Put the learning rates to those of a schedule that was loaded, for a fresh optimizer."""
        if isinstance(scheduler, FactorSchedule):
            scheduler.apply()
            return
        for group, rate in zip(self._optimizer.param_groups, scheduler.get_last_lr(), strict=False):
            group["lr"] = rate

    def reassert(self, before: Sequence[Mapping[str, object]], scheduler: LRScheduler | None) -> None:
        """Put in force what differs from a checkpoint's options; a schedule keeps its place.

        Args:
            before: What `plain` gave in the checkpoint.
            scheduler: The schedule, loaded.
        """
        changed = self._changed(before)
        groups = zip(self._optimizer.param_groups, self._built, changed, strict=True)
        for number, (group, built, names) in enumerate(groups):
            if "initial_lr" in names:
                then = before[number] if len(before) == len(self._built) else group
                old, new = then.get("initial_lr"), built["initial_lr"]
                if isinstance(old, int | float) and old and isinstance(new, int | float):
                    group["lr"] = group["lr"] * (new / old)
                else:
                    group["lr"] = new
            group.update({name: built[name] for name in names if name in group and name in built})
        if scheduler is not None and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group["initial_lr"] for group in self._optimizer.param_groups]
        if isinstance(scheduler, FactorSchedule) and any("initial_lr" in names for names in changed):
            scheduler.apply()  # which knows of a floor that is a rate and no share, and does not scale

    def _changed(self, before: Sequence[Mapping[str, object]]) -> list[set[str]]:
        """Names of the options that differ, by group; all of them if the groups cannot be told apart."""
        now = self.plain()
        if len(before) != len(now):
            return [set(options) for options in now]
        return [
            {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
            for old, new in zip(before, now, strict=True)
        ]


def optimizer_kind(optimizer: Optimizer) -> str:
    """The name of an optimizer, of several that step together such as `AdamW+Muon`."""
    if isinstance(optimizer, OptimizerFacade):
        return "+".join(optimizer_kind(member) for member in optimizer.optimizers)
    # A subclass takes up torch's state, and the other way round; checkpoints know it by this name.
    known = (kind.__name__ for kind in (AdamW, Muon) if isinstance(optimizer, kind))
    return next(known, type(optimizer).__name__)


def _options(group: Mapping[str, object]) -> Options:
    kept = {name: value for name, value in group.items() if name not in _LEFT_OUT}
    # A rate that is a tensor moves in place.
    rate = kept.get("initial_lr", group["lr"])
    return {**kept, "initial_lr": rate.item() if isinstance(rate, Tensor) else rate}


def _plain(value: object) -> object:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
