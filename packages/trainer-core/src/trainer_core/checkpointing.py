"""A run's checkpoints: how it resumes from one, owns its output directory, and makes room there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from checkpoint_core import (
    CheckpointConfig,
    CheckpointError,
    CheckpointManager,
    DirectoryLease,
    LeaseHeldError,
    LeaseLostError,
    ModelState,
    Preprocessor,
    find_latest_checkpoint,
    find_lease_holder,
)
from dist_env import broadcast_object, gather_objects, get_logger, split_address
from perf_metrics import GOODPUT_FOLDER, GoodputLogger, JsonLogger

from .arguments import TrainingArguments
from .arguments.config import Changes
from .data.loaders import keeps_position
from .distributed.executor import as_dtensor
from .distributed.ranks import Ranks
from .errors import ConfigurationError
from .memory_tier import memory_directory
from .optimization.averaging import TRAINING_WEIGHTS
from .restarts import newest_checkpoint
from .run import Run
from .run_state import RunComponents

logger = get_logger(__name__)


def build_manager(
    args: TrainingArguments,
    ranks: Ranks,
    components: RunComponents,
    preprocessor: Preprocessor | None,
    lease: DirectoryLease,
) -> CheckpointManager:
    """The manager of a run's checkpoints in its output directory; it saves only under the lease of that."""
    memory = memory_directory(args)
    config = CheckpointConfig(
        output_dir=args.output_dir,
        save_total_limit=args.save_total_limit,
        save_on_each_node=args.save_on_each_node,
        remote_dir=args.remote_dir,
        remote_save_total_limit=args.remote_save_total_limit,
        memory_dir=None if memory is None else memory.path,
    )
    if args.tracks_best:
        config = replace(
            config,
            best_metric=args.best_metric,
            greater_is_better=args.best_is_greater,
            preserve_n_best=args.preserve_n_best if args.preserve_best_model else 1,
        )
    return CheckpointManager(
        config,
        dist=ranks.env,
        stateful_provider=components,
        preprocessor=preprocessor,
        # In a store the conditional put of each manifest keeps runs apart.
        lease=None if args.saves_to_store else lease,
    )


def resume(run: Run) -> Path | None:
    """Load the checkpoint that `resume_from_checkpoint` asks for, if there is one.

    Returns:
        The checkpoint; None for a fresh start.

    Raises:
        ConfigurationError: If the output directory holds checkpoints that this run would not continue.
        checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it.
    """
    wanted, begins = run.args.resume_from_checkpoint, run.begins
    only_memory = begins is not None and begins.only_memory
    loaded = None
    if wanted is not False:
        loaded = load(run, None if wanted is True else wanted, only_memory=only_memory)
    if loaded is None and begins is not None and isinstance(begins.otherwise, str):
        logger.warning("no checkpoint of this run can be used: it begins with %s again", begins.otherwise)
        loaded = load(run, begins.otherwise)
    if loaded is not None:
        say_changes(run.progress.changes)
    if run.args.save_strategy == "no" or starts_over(run):
        return loaded
    if loaded is not None and run.manager.owns(loaded):
        if not run.progress.loaded:
            raise _without_counters(run, loaded)
        return loaded
    other = newest_checkpoint(run.args)
    if other is not None:
        aside = (
            "or set resume_from_checkpoint=False and overwrite_output_dir=True, which moves what is there to "
            f"{PREVIOUS}<time>/"
        )
        raise ConfigurationError(
            "resume_from_checkpoint",
            wanted,
            f"starts another run beside {other}, whose place its own checkpoints would take",
            f"choose another output_dir, {aside if run.args.store_address is None else _PRUNE}",
        )
    return loaded


def _without_counters(run: Run, loaded: Path) -> ConfigurationError:
    """The error for a checkpoint from which the run would begin at step 0, in the same directory."""
    return ConfigurationError(
        "resume_from_checkpoint",
        run.args.resume_from_checkpoint,
        f"chooses {loaded}, which lacks trainer.json, so the run would begin at step 0, and replace "
        "checkpoints beside it or be passed over for them",
        f"to begin at step 0 with its weights and states, set resume_from_checkpoint={str(loaded)!r} and "
        "another output_dir. To continue from an older checkpoint, name that one",
    )


def load(run: Run, path: str | None, *, only_memory: bool = False) -> Path | None:
    """Load a checkpoint, the newest of the run when no path is given, or with `only_memory` of its memory.

    Returns:
        The checkpoint; None if there is none.

    Raises:
        ConfigurationError: If the run trains, and an argument differs that may not.
        checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it, or its
            state does not fit this run.
    """
    run.progress.loaded = False
    # Before: what another run saves meanwhile may not be what is loaded.
    run.lease.note_content()
    average = run.built.average
    with nullcontext() if average is None else average.shown():
        try:
            loaded = run.manager.load_checkpoint(path, only_memory=only_memory)
        except CheckpointError as error:
            # What is wrong then is a setting, and not the checkpoint.
            raise (run.progress.refusal or error) from error
        if average is not None and loaded is not None and TRAINING_WEIGHTS in loaded.missing:
            average.forget()
            logger.warning("%s has no average of weights: it begins with those of this step", loaded.path)
    if loaded is None:
        return None
    run.progress.settle(run.schedule, fresh_optimizer="optimizer" in loaded.missing)
    run.loaded, run.went_back, run.holds_best = loaded.path, path is not None, False
    run.in_memory = run.manager.is_in_memory(loaded.path)
    run.saved_step = -1 if run.in_memory else run.state.global_step
    run.announced_epoch = run.progress.generators_before_epoch = None
    run.update_epoch()
    note_best(run)
    if run.loader is not None and not keeps_position(run.loader):
        logger.warning(
            "the training loader (%s) keeps no position: its epoch begins anew, so data will repeat",
            type(run.loader).__name__,
        )
    logger.info("resumed from %s at step %d", loaded.path, run.state.global_step)
    return loaded.path


def say_changes(changes: Changes) -> None:
    """Say which arguments differ from those of the checkpoint that a run continues from."""
    for change in changes.warned:
        logger.warning("changed since the checkpoint, and changes the curve from here on: %s", change)
    for change in changes.allowed:
        logger.info("changed since the checkpoint: %s", change)


def load_best(run: Run) -> bool:
    """Put the weights of the best checkpoint into the model, and nothing else of it; whether there is one."""
    path = run.state.best_model_checkpoint
    if path is None:
        logger.warning("no checkpoint has a value of %s: the model stays as it is", run.args.best_metric)
        return False
    # By the manager, because where nodes keep checkpoints together each has a part of the weights.
    run.manager.load_model(path)
    run.holds_best = True
    run.built.weights_replaced()
    logger.info("weights of the best checkpoint are in the model: %s", path)
    return True


def note_best(run: Run) -> None:
    """Write into the state which checkpoint is the best one; collective."""
    if run.args.tracks_best and (ranked := run.manager.best_checkpoints()):
        run.state.best_metric = ranked[0].value
        run.state.best_model_checkpoint = str(ranked[0].path)


def make_room(run: Run) -> None:
    """Move aside what a run that begins would replace, or a later start would prefer to it; collective.

    A fresh start (`resume_from_checkpoint=False` with `overwrite_output_dir=True`) leaves all checkpoints and
    the log behind, one from an older checkpoint of its directory those of later steps.

    Raises:
        ConfigurationError: On every rank, if something cannot be moved.
    """
    args, env, loaded = run.args, run.ranks.env, run.loaded
    if args.save_strategy == "no":
        return
    if args.store_address is not None:
        run.ranks.fail_together(_cannot_make_room(run), "begin in the output directory")
    paths: list[Path] = []
    if loaded is not None and run.manager.owns(loaded):
        if run.went_back and not args.saves_to_store:
            paths = checkpoints_in(args.output_dir, above=run.state.global_step)
    elif starts_over(run):
        logs = [one.filename for one in run.events.callbacks if isinstance(one, JsonLogger)]
        paths = [*checkpoints_in(args.run_path), *(args.log_path / name for name in logs)]
        if any(isinstance(one, GoodputLogger) for one in run.events.callbacks):
            paths.append(args.run_path / GOODPUT_FOLDER)
    if not run.ranks.any([bool(paths)])[0]:
        return
    failure = None
    # Where nodes keep checkpoints of their own, each has a directory of its own.
    if env.rank == 0 or (args.save_on_each_node and env.local_rank == 0):
        try:
            move_aside(args.run_path, paths)
        except ConfigurationError as error:
            failure = error
    if run.ranks.any([failure is not None])[0]:
        raise failure or ConfigurationError(
            "output_dir",
            args.output_dir,
            "cannot be cleared for this run by another rank",
            "see the error of that rank",
        )


_PRUNE = "or remove what is there with `checkpoint-core prune`"


def _cannot_make_room(run: Run) -> ConfigurationError | None:
    """What stands in the way of a run in a store, where nothing can be moved aside."""
    args = run.args
    if args.store_address is None or not (run.went_back or starts_over(run)):
        return None
    newest = find_latest_checkpoint(args.store_address)
    if newest is None or (run.loaded is not None and int(newest.name.rpartition("-")[2]) <= run.saved_step):
        return None
    return ConfigurationError(
        "resume_from_checkpoint",
        args.resume_from_checkpoint,
        f"begins before {newest}, which a later start would prefer, and stores move nothing aside",
        f"choose another {'output_dir' if args.saves_to_store else 'remote_dir'}, {_PRUNE}",
    )


def starts_over(run: Run) -> bool:
    """Whether the run begins anew where another one was, and was told to move that aside."""
    args = run.args
    begins = run.saved_step < 0 and not run.in_memory
    return args.resume_from_checkpoint is False and args.overwrite_output_dir and begins


def end_upload(run: Run) -> None:
    """At the end of a run, wait until `remote_dir` has what it should keep, unless the run was told to end.

    Raises:
        checkpoint_core.CheckpointError: On every rank, if it does not have it.
    """
    cause = run.events.stop_cause
    if cause is not None and cause.resumable:
        run.manager.give_up_upload()  # A signal, or a time limit, does not wait for it.
    else:
        run.manager.wait_for_upload()


class _AdapterConfig(Protocol):
    is_prompt_learning: bool


class _WithAdapters(Protocol):
    """What is used of a model with adapters of peft."""

    peft_config: Mapping[str, _AdapterConfig]

    def save_pretrained(self, save_directory: str, /, *, state_dict: dict[str, Tensor]) -> object: ...


def has_adapters(model: nn.Module) -> TypeGuard[_WithAdapters]:
    """Whether peft has put adapters into a model, which are saved without the weights that they adapt."""
    return bool(getattr(model, "peft_config", None)) and callable(getattr(model, "save_pretrained", None))


def save_adapters(run: Run, directory: str, preprocessor: Preprocessor | None, *, overwrite: bool) -> None:
    """Write the adapters of a model as its own `save_pretrained` does, from whole weights; collective.

    Args:
        run: Its model has adapters.
        directory: Where to, on a disk; made if needed.
        preprocessor: The tokenizer or processor.
        overwrite: Replace adapters that are there.

    Raises:
        ConfigurationError: If ranks hold other parts of the model than can be gathered, if adapters are there
            already and are not to be overwritten, or if more is trained than peft saves.
    """
    args, env, model = run.args, run.ranks.env, run.built.model
    adapted = _checked_adapters(run)
    if split_address(directory) is not None:
        raise ConfigurationError(
            "output_dir",
            directory,
            "is in an object store, and save_model writes to a directory",
            "name one, as in save_model('model')",
        )
    writes = env.rank == 0 or (args.save_on_each_node and env.local_rank == 0)
    tensors, kept = ModelState(model).tensors(), []
    with run.ranks.failing_together(f"save the adapters to {directory}"):
        if writes:
            _refuse_overwriting(Path(directory), () if overwrite else adapted.peft_config)
            kept = _names_to_save(model, adapted.peft_config, tensors)
    kept = broadcast_object(kept, env)  # peft looks for the base on the disk, or in the network
    whole: dict[str, Tensor] = {}
    for name in kept:
        gathered = _gathered(tensors[name], run.ranks.device)
        if writes:
            whole[name] = gathered.cpu()
    with run.ranks.failing_together(f"save the adapters to {directory}"):
        if writes:
            adapted.save_pretrained(directory, state_dict=whole)
            if preprocessor is not None:
                preprocessor.save_pretrained(directory)


def _gathered(value: Tensor, device: torch.device) -> Tensor:
    """A tensor with the parts of all ranks; those that rest on the host travel from the device."""
    value = value.detach()
    part = None if as_dtensor(value) is None else as_dtensor(value.to(device))
    return value if part is None else part.full_tensor()


def _checked_adapters(run: Run) -> _WithAdapters:
    """The model, unless its adapters would be saved in parts."""
    model = run.built.model
    if not has_adapters(model):
        hint = "Return what get_peft_model makes from model_init, or write the whole model with save_model."
        raise TypeError(f"{type(model).__name__} has no adapters of peft to save. {hint}")
    if run.ranks.layout.pipeline > 1:
        raise ConfigurationError(
            "mesh",
            str(run.ranks.layout),
            "gives each stage its own adapters, which save_model cannot bring together",
            "save a checkpoint, load it with a mesh without pp, and save the model there",
        )
    for config in model.peft_config.values():
        if run.built.is_partial and config.is_prompt_learning:
            raise ConfigurationError(
                "mesh",
                str(run.ranks.layout),
                f"shards the prompt of {type(config).__name__}, which peft saves as each rank has it",
                "save a checkpoint, load it with one process or dp, and save the model there",
            )
    return model


def _refuse_overwriting(directory: Path, adapters: Iterable[str]) -> None:
    places = [directory if name == "default" else directory / name for name in adapters]
    for found in (place for place in places if (place / "adapter_config.json").exists()):
        raise ConfigurationError(
            "output_dir",
            str(found),
            "has adapters already",
            "choose another directory, or set overwrite_output_dir=True to replace them",
        )


def _names_to_save(model: nn.Module, adapters: Iterable[str], tensors: Mapping[str, Tensor]) -> list[str]:
    """What peft saves: adapters, trained or not, and what it keeps beside them, such as new embeddings."""
    select, adapters = import_module("peft").get_peft_model_state_dict, set(adapters)
    # One number of memory for each, whose address tells what peft has chosen.
    like = {name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in tensors.items()}
    parts = [select(model, state_dict=like, adapter_name=name) for name in adapters]
    kept = {tensor.data_ptr() for part in parts for tensor in part.values()}
    # By name too: peft prunes some adapters, and computes others, such as prefixes.
    saved = [name for name in like if like[name].data_ptr() in kept or adapters & {*name.split(".")}]
    if trained := min((name for name in {*like} - {*saved} if tensors[name].requires_grad), default=None):
        raise ConfigurationError(
            "model",
            trained,
            "is trained, and peft does not save it with the adapters",
            "name its module in modules_to_save of the adapters' config, or freeze it; a checkpoint has it",
        )
    return saved


PREVIOUS = "previous-"
"""Folders of an output directory in which an earlier run rests; the rest of the name is the time in UTC."""


def checkpoints_in(output_dir: str | Path, *, above: int = -1) -> list[Path]:
    """Directories with a checkpoint's name, good or bad, whose step is greater than `above`."""
    directory = Path(output_dir)
    found = directory.glob("checkpoint-*") if directory.is_dir() else ()
    steps = {path: path.name.removeprefix("checkpoint-") for path in found if path.is_dir()}
    return sorted(path for path, step in steps.items() if step.isdecimal() and int(step) > above)


def move_aside(output_dir: str | Path, paths: Iterable[Path]) -> Path | None:
    """Move files and folders to a new `previous-<time>/` in an output directory.

    Nothing is deleted, and nothing in such a folder is found by a later resume. Let one process do it.

    Args:
        output_dir: The output directory.
        paths: What to move; what does not exist is left out.

    Returns:
        The folder; None if there was nothing to move.

    Raises:
        ConfigurationError: If something cannot be moved.
    """
    existing = [path for path in paths if path.exists()]
    if not existing:
        return None
    directory = Path(output_dir).absolute()
    name = PREVIOUS + time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        folder = _make_new(directory, name)
        for path in existing:
            shutil.move(path, folder / path.name)  # the logs may lie on another file system
    except OSError as error:
        raise ConfigurationError(
            "output_dir",
            str(output_dir),
            f"holds an earlier run that cannot be moved aside ({error})",
            "allow this process to rename there, or choose another output_dir",
        ) from error
    names = ", ".join(path.name for path in existing)
    logger.warning("moved aside to %s: %s", folder, names)
    return folder


def _make_new(directory: Path, name: str) -> Path:
    number = 1
    while True:
        folder = directory / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


class OutputLease:
    """The lease of a trainer's output directory, and of its log directory where that is another one.

    One rank takes it for all; with `save_on_each_node` one rank of each node takes that of its node.

    Args:
        args: The arguments.
        ranks: The ranks.
    """

    def __init__(self, args: TrainingArguments, ranks: Ranks) -> None:
        times = {
            "heartbeat_seconds": args.lease_heartbeat_seconds,
            "takeover_seconds": args.lease_takeover_seconds,
        }
        self.directory = DirectoryLease(args.run_path, **times)
        """For the manager of the checkpoints, if they are in that directory."""
        self._args = args
        self._ranks = ranks
        env = ranks.env
        self._leases: list[tuple[str, DirectoryLease]] = []
        if env.rank == 0 or (args.save_on_each_node and env.local_rank == 0):
            self._leases.append(("output_dir", self.directory))
        if env.rank == 0 and args.log_path.resolve() != args.run_path.resolve():
            self._leases.append(("logging_dir", DirectoryLease(args.log_path, **times)))
        self._users = 0
        self._known: set[str] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Own the directories meanwhile; may be entered again inside. Collective.

        Raises:
            ConfigurationError: On every rank, if another run owns one, or one cannot be written, or another
                run has saved in the output directory since this one left it or loaded its state there.
        """
        if self._users == 0:
            with self._ranks.lost_rank_errors("taking the output directory"):
                self._acquire()
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                if self._leases and self._owns_still():
                    self.note_content()
                self._release()

    def note_content(self) -> None:
        """Remember which checkpoints are in the output directory: others that come are another run's."""
        self._known = self._content()

    def _content(self) -> set[str]:
        """Names of what every run leaves that continues, or begins anew, in the output directory."""
        directory = self._args.run_path
        return {path.name for path in (*checkpoints_in(directory), *directory.glob(f"{PREVIOUS}*"))}

    def _owns_still(self) -> bool:
        try:
            self.directory.check()
        except LeaseLostError:
            return False
        return True

    def may_log(self) -> bool:
        """Whether callbacks may write a record now.

        Between two calls of `train` nothing is owned, and an evaluation may continue beside the training of
        another process, whose log it must leave alone.

        Raises:
            checkpoint_core.LeaseLostError: If another run has taken over what this one owned.
        """
        if self._users:
            for _, lease in self._leases:
                if lease.held:
                    lease.check()
            return True
        holder = find_lease_holder(self._args.log_path)
        if holder is not None:
            logger.warning(
                "%s is in use by %s: a record of this process is not written to its logs",
                self._args.log_path,
                holder.describe(),
            )
        return holder is None

    def _acquire(self) -> None:
        refusals: list[list[str] | None] = gather_objects(self._refusal(), self._ranks.env)
        for refusal in refusals:
            if refusal is not None:
                self._release()
                setting, value, rule, fix = refusal
                raise ConfigurationError(setting, value, rule, fix)

    def _refusal(self) -> list[str] | None:
        """Take the leases; what stands against it, as the parts of a ConfigurationError."""
        if (refusal := self._refusal_of_lease()) is not None:
            return refusal
        if self._known is None:
            self.note_content()
        new = sorted(self._content() - (self._known or set())) if self._leases else []
        if not new or self._args.save_strategy == "no":
            return None
        rule = (
            f"was used by another run, which left {new[-1]} there, and this trainer does not have the state "
            "of that run"
        )
        return [
            "output_dir",
            self._args.output_dir,
            rule,
            "call load_checkpoint() first, or make a new Trainer",
        ]

    def _refusal_of_lease(self) -> list[str] | None:
        for setting, lease in self._leases:
            value = str(getattr(self._args, setting))
            try:
                lease.acquire()
            except LeaseHeldError as error:
                fix = f"wait until that run has ended, stop it, or choose another {setting}"
                return [setting, value, f"is in use by {error.holder.describe()}", fix]
            except CheckpointError as error:
                if self._args.save_strategy != "no":
                    return [setting, value, str(error), f"choose another {setting}"]
                # A run that writes nothing may have a directory that cannot be written.
                logger.info("this run does not own its directory: %s", error)
        return None

    def _release(self) -> None:
        for _, lease in self._leases:
            lease.release()
