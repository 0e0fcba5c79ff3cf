"""The trainer: what a user calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import CheckpointManager, Preprocessor, StateComponent
from dist_env import DistributedEnvInterface, get_logger
from perf_metrics import DefaultMetrics, ProgressCallback

from .arguments import TrainingArguments
from .arguments.choices import trackers_of
from .arguments.config import arguments_from_dict, plain_arguments
from .arguments.training import warn_unused_settings
from .build import assemble, seed_everything
from .callbacks import InfoCallback
from .callbacks.trackers import refuse_second_tracker, trackers_by_name
from .checkpointing import (
    OutputLease,
    end_upload,
    has_adapters,
    load,
    load_best,
    make_room,
    resume,
    save_adapters,
)
from .data.loaders import (
    Batch,
    Collator,
    EvalData,
    EvalMetric,
    TrainData,
    check_data,
    evaluation_sets,
    names_of_sets,
)
from .distributed.build import layout_of, listed, transforms_for
from .distributed.ranks import BatchPlacement, Ranks, check_device_settings, check_several, loading_paused
from .distributed.transforms import ModelTransform
from .dry_run import DryRun, dry_run
from .errors import DataError
from .hints import InputHints
from .inputs import (
    OptimizerClass,
    TrainerInputs,
    check_begins_anew,
    check_device,
    check_inputs,
    environment_of,
    model_source,
    optimizer_factory_of,
)
from .loop import TrainingLoop
from .loss import FusedLossFactory, OnTargets, RoutedLoss, TokenLoss
from .model import ModelInit, RecomputeFn, check_cache_dir, run_settings, verify_initialised
from .model.run_settings import inference_mode_guard
from .optimization import OptimizerFactory, OptimizerGroups, SchedulerFactory
from .periodic import EXIT_RESUMABLE, Actions, StopRequests
from .restarts import has_checkpoint_to_resume, leave_mark, settle_beginning
from .run import Run, training_switches
from .state import CallbackHandler, StopCause, TrainerControl, TrainerState, TrainOutput, fresh_state

logger = get_logger(__name__)

_OF_ONE_RANK = ("device", "logging_dir")
"""Arguments that may differ between ranks."""


class Trainer(InputHints):
    """Trains a model: one loop, whatever the devices and how they are used.

    Everything is built once, at the first call that needs it. Only `train` continues from a checkpoint by
    itself; call `load_checkpoint` to evaluate or save another state.

    Args:
        args: The arguments, or a dict of them.
        model: A built module; or give `model_init`.
        model_init: Builds the module, called once after seeding.
        initial_weights: A directory with weights in the Hugging Face layout, also a checkpoint, that a run
            begins with which does not continue from a checkpoint of its own. Of a sharded model each rank
            reads its part only.
        train_dataset: A dataset, or a ready-made loader (iterable with `batch_size`), which is used as it is.
        eval_dataset: Likewise, for evaluation; or several by name, `{"one": a, "two": b}`, whose metrics are
            `eval_one_loss`, `eval_two_loss` and so on.
        data_collator: Turns a list of examples into a batch dict; torch's default otherwise.
        processing_class: Tokenizer or similar; its `save_pretrained` is called beside saved weights.
        callbacks: Replaces the default callbacks (`Trainer.default_callbacks`). The trackers that
            `args.report_to` names come behind them.
        compute_loss_func: A sum-and-count loss, such as `ClassificationLoss()`, `RegressionLoss()` or
            `MeanLoss(function, count)`; cross-entropy of the next token otherwise.
        fused_loss_factory: Called with the model's output layer; gives a loss of hidden states that never
            makes whole logits. For the built-in ones set `fused_loss`.
        eval_metrics: Further metrics of an evaluation by name, each `(predictions, labels) -> (sum, count)`.
        distributed_env: Rank and device. Otherwise those of the process group that exists, or of the job that
            torchrun has started, whose group is formed then; one process without either.
        optimizer_factory: Called with the named parameters; AdamW from the arguments otherwise.
        optimizer_cls_and_kwargs: An optimizer class and its options, instead of a factory.
        optimizer_groups: Options, or optimizers of their own, for parameters by name pattern.
        lr_scheduler_factory: Called with the optimizer; the schedule of the arguments otherwise. A schedule
            that has handlers of events becomes a callback too.
        activation_checkpointing_fn: With `activation_checkpointing="custom"`: called with the model, names
            those of its modules that are recomputed in the backward pass.
        parallel: How to use several devices: transforms that combine, in any order, such as
            `[FullyShard(), PipelineStages()]`, beside those of the class. `args.mesh` gives their sizes; a
            dimension that no transform uses gets the one of the package that offers it.
        state_components: Further state of your own that is saved with each checkpoint and restored from it,
            after that of the run.

    Raises:
        ConfigurationError: For arguments that cannot be used, before any work.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    """What a dict of arguments becomes."""

    def __init__(
        self,
        args: TrainingArguments | Mapping[str, object],
        *,
        model: nn.Module | None = None,
        model_init: ModelInit | None = None,
        initial_weights: str | Path | None = None,
        train_dataset: TrainData | None = None,
        eval_dataset: EvalData | None = None,
        data_collator: Collator | None = None,
        processing_class: Preprocessor | None = None,
        callbacks: Iterable[object] | None = None,
        compute_loss_func: TokenLoss | None = None,
        fused_loss_factory: FusedLossFactory | None = None,
        eval_metrics: Mapping[str, EvalMetric] | None = None,
        distributed_env: DistributedEnvInterface | None = None,
        optimizer_factory: OptimizerFactory | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        optimizer_groups: OptimizerGroups | None = None,
        lr_scheduler_factory: SchedulerFactory | None = None,
        activation_checkpointing_fn: RecomputeFn | None = None,
        parallel: Sequence[ModelTransform] = (),
        state_components: Sequence[StateComponent] = (),
    ) -> None:
        self.args = arguments_from_dict(self.arguments_class, args) if isinstance(args, Mapping) else args
        self.processing_class = processing_class
        env = distributed_env or environment_of(self.args)
        check_device(self.args, env)
        given = [*self.preset(), *listed(parallel)]
        layout = layout_of(self.args, given, env)
        self.transforms: list[ModelTransform] = transforms_for(self.args, given, layout)
        """How the devices are used, in the order in which they are applied."""
        self.ranks: Ranks = Ranks(env, layout)
        """The ranks of the job: where each stands in the layout, and what they agree on."""
        self.placement: BatchPlacement = BatchPlacement(self.args, self.ranks)
        """Which rank gets which batches."""
        self._connect()
        check_cache_dir(self.args, self.ranks)
        check_data(self.args, train_dataset, eval_dataset, data_collator)
        warn_unused_settings(self.args, env.device.type, evaluates=eval_dataset is not None)
        self._parts = TrainerInputs(
            model=model_source(model, model_init),
            initial_weights=None if initial_weights is None else Path(initial_weights),
            train_data=train_dataset,
            eval_data=eval_dataset,
            collator=data_collator,
            loss=compute_loss_func,
            fused_loss=fused_loss_factory,
            eval_metrics=dict(eval_metrics or {}),
            optimizer=optimizer_factory_of(optimizer_factory, optimizer_cls_and_kwargs),
            optimizer_groups=optimizer_groups,
            scheduler=lr_scheduler_factory,
            preprocessor=processing_class,
            recompute_fn=activation_checkpointing_fn,
            state_components=tuple(state_components),
        )
        check_inputs(self.args, self._parts, self.ranks.layout)
        self.ranks.check_same(self._parts.facts())
        self.state: TrainerState = fresh_state(self.args, env)
        if callbacks is None:
            callbacks = self.default_callbacks()
        self._events = CallbackHandler(callbacks, self.args, self.state)
        self._add_trackers()
        self._lease = OutputLease(self.args, self.ranks)
        self._run_args = self.args
        self._prepared: Run | None = None
        self._resumed = False
        self._has_room = False

    def preset(self) -> list[ModelTransform]:
        """How this class uses several devices, beside what `parallel` gives; here not at all.

        Raises:
            ConfigurationError: If the arguments are of another class than it needs.
        """
        return []

    @staticmethod
    def default_callbacks() -> list[object]:
        """Throughput, MFU and HFU, then the facts of the run, then the progress table."""
        return [DefaultMetrics(), InfoCallback(), ProgressCallback()]

    def train(self, *, fresh: bool = False) -> TrainOutput:
        """Train to the end of the run, from the newest checkpoint if the arguments say so.

        A run that has reached its end says so, and returns the metrics of its end, as far as they are known.

        SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and `max_train_seconds` finish the step, save and return; what
        ended the run early is in `stop_cause`, and `exit_code` says what to exit with.

        Args:
            fresh: Begin a new run, on all ranks; what an earlier one has left moves to `previous-<time>/`.

        Returns:
            The step reached and the final metrics.

        Raises:
            ConfigurationError: If another run owns the output directory or trained there meanwhile, or
                something that this trainer was given cannot begin anew.
            DataError: If there is no training data, or an epoch of it is empty.
            checkpoint_core.CheckpointError: At the end, if `remote_dir` does not have what it should keep.
            NonFiniteGradientError: If a gradient is not finite and `nonfinite_policy` is "raise".
        """
        if self._parts.train_data is None:
            raise DataError("train() needs a train_dataset. Give one to the Trainer.")
        self.ranks.check_same({"fresh of train()": fresh})
        if fresh:
            self._start_over()
        self._events.begin_run()
        # Signals are heeded from here on, as loading may take long; also while ranks look for a lost one: a
        # launcher, which has noticed as well, asks the others to end.
        stopping = StopRequests(self.args.max_train_seconds)
        with self.owns_output_dir():
            with stopping as stops, self.ranks.lost_rank_errors("training"):
                run = self._prepare()
                self._resume(run)
                if not self._has_room:
                    make_room(run)
                    leave_mark(run.args, run.ranks)
                    self._has_room = True
                with training_switches(run):
                    output = TrainingLoop(run, Actions(run, lambda: stops.cause is not None), stops).train()
            end_upload(run)  # which a signal ends at once
            return output

    def evaluate(self, eval_dataset: EvalData | None = None) -> dict[str, float]:
        """Score the evaluation set, or another one, with the model as it is.

        Returns:
            `eval_loss` (nats per counted token), `eval_tokens`, `eval_seconds` and the metrics asked for; of
            several sets `eval_<name>_loss` and so on.

        Raises:
            DataError: If there is nothing to evaluate on.
        """
        with self.ranks.lost_rank_errors("evaluating"):
            return self._evaluate(eval_dataset)

    def _evaluate(self, eval_dataset: EvalData | None) -> dict[str, float]:
        run, data = self._prepare(), self._prepare().evaluation
        self.ranks.check_same(
            {"eval_dataset of evaluate()": None if eval_dataset is None else names_of_sets(eval_dataset)}
        )
        if eval_dataset is not None:
            data = evaluation_sets(eval_dataset, self.args, self.ranks, self.placement, self._parts.collator)
        if data is None:
            raise DataError("evaluate() needs an eval_dataset. Give one here or to the Trainer.")
        with run_settings(self.args, self.ranks.device, training=False):
            metrics = Actions(run).evaluate(data)
        if metrics is None:
            raise RuntimeError("an evaluation that nobody can stop was stopped.")
        return metrics

    def dry_run(self, *, passes: bool = True, memory_only: bool = False) -> DryRun:
        """Build this rank's part of the run and make a step, on tensors without values.

        It takes little memory and time, whatever the model, and shows what would be built, held and sent. In
        `dist_env.fake_job` it does so for the first rank of a job of any size. It reads the first batches
        of the training data, and writes nothing. Trainer and model are of no use afterwards.

        Args:
            passes: Whether to make the forward and backward passes; without them only the state is known.
            memory_only: Whether to leave out what tells nothing of memory: FLOPs, clipping, and microbatches
                behind the second where there is no pipeline.

        Returns:
            What this rank would hold and do.

        Raises:
            ConfigurationError: For settings that cannot be applied, as in `train`.
            DataError: If there is no training data.
        """
        return dry_run(
            self.args,
            self.ranks,
            self.transforms,
            self._parts,
            passes=passes,
            memory_only=memory_only,
        )

    def save_model(self, output_dir: str | None = None, *, averaged: bool = True) -> None:
        """Write weights, config and processing class as a Hugging Face directory; all ranks call it together.

        Of a model with adapters of `peft` it writes what their `save_pretrained` does.

        Args:
            output_dir: The directory; that of the run otherwise.
            averaged: Where an average of the weights is kept, write that.

        Raises:
            checkpoint_core.CheckpointError: Weights are there and may not be replaced, or writing failed.
            ConfigurationError: If that is so of adapters, or they cannot be gathered.
        """
        directory, overwrite = output_dir or self.args.output_dir, self.args.overwrite_output_dir
        with self.ranks.lost_rank_errors("saving the model"):
            run = self._prepare()
            average = None if averaged else run.built.average
            with self.synced_weights(), nullcontext() if average is None else average.in_training():
                if has_adapters(run.built.model):
                    save_adapters(run, directory, self.processing_class, overwrite=overwrite)
                else:
                    run.manager.save_model(directory, overwrite_output_dir=overwrite)

    def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Save everything that a run needs to continue; all ranks call it together.

        Args:
            path: A new directory to save to, which is never removed and never found by itself: name it as
                `resume_from_checkpoint` to continue from it. None: the checkpoint of this step in the output
                directory.

        Returns:
            The checkpoint.

        Raises:
            checkpoint_core.CheckpointError: On every rank, if it cannot be saved there.
            ConfigurationError: If the model holds the best weights, and not those of this step.
        """
        with self.owns_output_dir(), self.ranks.lost_rank_errors("saving a checkpoint"):
            return Actions(self._prepare()).save(path)

    def owns_output_dir(self) -> AbstractContextManager[None]:
        """A context in which no other run can train in the output directory; all ranks enter it together.

        `train` enters it by itself. It raises ConfigurationError on all ranks, naming the process, if another
        run owns the directory; one on another machine is watched first, `lease_takeover_seconds` at most.
        """
        return self._lease.held()

    def load_checkpoint(self, path: str | None = None) -> bool:
        """Go to the state of the checkpoint at `path`, or of the newest one in the output directory.

        Returns:
            Whether there was one to load.

        Raises:
            checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it.
        """
        with self.ranks.lost_rank_errors("loading a checkpoint"):
            self._resumed = load(self._prepare(), path) is not None
            self._has_room = False
        return self._resumed

    def load_best_model(self) -> bool:
        """Put the weights of the best checkpoint into the model, and nothing else of it.

        Returns:
            Whether there is a best checkpoint.
        """
        with self.ranks.lost_rank_errors("loading the best model"):
            return load_best(self._prepare())

    def add_callback(self, callback: object) -> None:
        """Add a callback, or an instance of a callback class.

        Raises:
            ConfigurationError: If it is a tracker that `args.report_to` names too.
        """
        refuse_second_tracker(callback, self.args.report_to)
        self._events.add(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Take out a callback by identity or exact class; None if there is none."""
        return self._events.pop(callback)

    def remove_callback(self, callback: object) -> None:
        """Take out a callback by identity or exact class, if it is there."""
        self.pop_callback(callback)

    def log(self, record: dict[str, object]) -> None:
        """Put an entry into the log and show it to the callbacks."""
        Actions(self._prepare()).log(record)

    def untimed(self, what: str) -> AbstractContextManager[None]:
        """A context whose time does not count as training: speed and utilization leave it out.

        Args:
            what: Name of what is done in it.
        """
        return self._prepare().meter.exclude(what)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """A context to let the model write text: all ranks call the model alike, and write the same.

        It is in evaluation mode, without gradients; modes and random generators are put back. The time does
        not count as training, and nothing is loaded ahead.
        """
        run, untimed = self._prepare(), self.untimed("text samples")
        model, paused = run.built.model, loading_paused(run.loader)
        with untimed, inference_mode_guard(model), paused, run.built.generating():
            yield

    def synced_weights(self) -> AbstractContextManager[None]:
        """A context in which the model is the one that would be saved or scored; all ranks enter it together.

        It is another one than each rank trains only where an average of the weights is kept, or ranks train
        models of their own, or have buffers of their own such as running means.
        """
        return self._prepare().built.synced_weights(optimizer=False)

    def unwrapped_model(self) -> nn.Module:
        """The model without parallel wrappers."""
        return self._prepare().built.model

    def meta_model(self) -> nn.Module:
        """The model with all its parameters, to count them; where ranks hold parts, they have no storage."""
        return self._prepare().built.meta_model

    @property
    def matmul_dtype(self) -> str:
        """What matrix products run in, as peak tables name it: what a transform makes of the arguments'."""
        return self._prepare().built.matmul_dtype or self.args.matmul_dtype

    @property
    def model(self) -> nn.Module:
        """The model without parallel wrappers, as `unwrapped_model()` gives it."""
        return self.unwrapped_model()

    @property
    def control(self) -> TrainerControl:
        """What callbacks have asked the run to do next."""
        return self._events.control

    @property
    def train_dataloader(self) -> Iterable[Batch] | None:
        """The loader of the training data; None without training data."""
        return self._prepare().loader

    @property
    def checkpoint_manager(self) -> CheckpointManager:
        """What writes and finds the checkpoints of the output directory."""
        return self._prepare().manager

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0 of the job, the one that prints and writes logs."""
        return self.state.is_world_process_zero

    @property
    def loss(self) -> TokenLoss:
        """The loss of the run."""
        loss = self._prepare().loss
        return loss.loss if isinstance(loss, OnTargets | RoutedLoss) else loss

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None without training data."""
        return self._prepare().optimizer

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule; None without training data, or without a schedule."""
        return self._prepare().scheduler

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that this run saved or began from; -1 if there is none."""
        return self._prepare().saved_step

    @property
    def stop_cause(self) -> StopCause | None:
        """The callback, signal or setting that ended the run early; None for a run that reached its end."""
        return self._events.stop_cause

    @property
    def exit_code(self) -> int:
        """What a script should exit with.

        75 (EX_TEMPFAIL) if the run was asked to stop early, has saved, and continues when it is started
        again; 1 if it was aborted, or left without saving; else 0.
        """
        cause = self.stop_cause
        if cause is None or not (cause.resumable or cause.aborted):
            return 0
        saved = cause.resumable and self.saved_step == self.state.global_step
        return EXIT_RESUMABLE if saved else 1

    def _connect(self) -> None:
        """Check the settings against the ranks, form the groups, and compare the arguments; collective."""
        args, ranks = self.args, self.ranks
        check_device_settings(args, ranks.device)
        for transform in self.transforms:
            transform.check(args, ranks)
        check_several(args, ranks.layout)
        active = [each for each in self.transforms if each.is_active(ranks.layout)]
        ranks.connect(alone=any(not each.keeps_parameters for each in active))
        ranks.check_same({"class of args": type(args).__name__})
        ranks.check_same({"parallel": [type(transform).__name__ for transform in self.transforms]})
        arguments = plain_arguments(args)
        ranks.check_same({name: value for name, value in arguments.items() if name not in _OF_ONE_RANK})

    def _add_trackers(self) -> None:
        """Add those that the arguments name, if every rank has their libraries; collective."""
        names = trackers_of(self.args.report_to)
        if not names:
            return
        for callback in self._events.callbacks:
            refuse_second_tracker(callback, names)
        with self.ranks.failing_together(f"report to {', '.join(names)}"):
            trackers = trackers_by_name(names)
        for tracker in trackers:
            self._events.add(tracker)

    def _prepare(self) -> Run:
        """Build everything at the first call; later calls return what was built."""
        if self._prepared is None:
            seed_everything(self.args.seed)
            begins = settle_beginning(self._run_args, self.ranks)
            resumes = has_checkpoint_to_resume(begins, self.ranks)
            run = self._prepared = assemble(
                begins.args,
                self.ranks,
                self.transforms,
                self.placement,
                self.state,
                self._events,
                self._parts,
                resumes=resumes,
                lease=self._lease,
            )
            run.begins, run.lacks_weights = begins, resumes
            own = {"processing_class": self.processing_class, "trainer": self}
            self._events.shared = run.shared_with_callbacks() | own
            if resumes and self.args.construct_model_on == "meta":
                self._fill(run)
            elif not resumes:
                self._begin_with_weights(run)
            self._events.fire("on_init_end")
        return self._prepared

    def _start_over(self) -> None:
        """Let the next run begin anew, and be built anew if this trainer holds the state of another one.

        Raises:
            ConfigurationError: If something that was given cannot begin anew.
        """
        # Not in `self.args`, by which `save_model` would replace weights from then on.
        self._run_args = replace(self.args, resume_from_checkpoint=False, overwrite_output_dir=True)
        run = self._prepared
        if run is None:
            return
        if not run.has_trained and run.loaded is None:
            run.begins = settle_beginning(self._run_args, self.ranks)
            run.args = run.begins.args
            return
        check_begins_anew(self._parts, [each for each in self._events.callbacks if each is not run.scheduler])
        if run.scheduler is not None:
            self._events.pop(run.scheduler)
        vars(self.state).update(vars(fresh_state(self.args, self.ranks.env)))
        self._prepared, self._resumed, self._has_room = None, False, False

    def _resume(self, run: Run) -> None:
        if not self._resumed:
            if resume(run) is None and run.lacks_weights:
                self._begin_with_weights(run)
            self._resumed, run.lacks_weights = True, False
        if run.holds_best:
            load(run, None)  # as another process would continue

    def _fill(self, run: Run) -> None:
        """Load what a model without weights was built for, at once: there is nothing to use until then."""
        self._resume(run)
        model = run.built.model
        if self._parts.initial_weights is None or run.loaded is not None:
            verify_initialised(model, () if run.loaded is None else model.state_dict())

    def _begin_with_weights(self, run: Run) -> None:
        if (directory := self._parts.initial_weights) is not None:
            run.built.load_weights(directory)
            verify_initialised(run.built.model, run.built.model.state_dict())
            logger.info("weights of %s are in the model", directory)
