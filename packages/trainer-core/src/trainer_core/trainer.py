"""The trainer: what a user calls, and what a run is built from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkpoint_core import Preprocessor
from dist_env import DistributedEnvInterface, StaticDistributedEnvironment
from perf_metrics import DefaultMetrics, ProgressCallback, ThroughputMeter, device_peak_flops

from .actions import Actions
from .arguments import TrainingArguments
from .checkpointing import RunComponents, RunProgress, build_manager, load, resume
from .config import arguments_from_dict
from .data_rules import check_data
from .errors import ConfigurationError, DataError
from .events import CallbackHandler
from .interrupt import InterruptGuard
from .interval import Interval
from .loaders import Collator, evaluation_data, train_loader
from .loop import TrainingLoop
from .loss import CausalLMLoss, TokenLoss
from .optimization import OptimizerFactory, SchedulerFactory, build_adamw, build_schedule
from .parallelism import ModelInit, Parallelism, SingleDevice
from .precision import matmul_precision
from .run import Run
from .schedule import set_length
from .seeding import seed_everything
from .speed import RunSpeed
from .state import StopCause, TrainerState, TrainOutput


class Trainer:
    """Trains a model: one loop, whatever the parallelism.

    Everything is built once, at the first call that needs it. Only `train` goes on from a checkpoint by
    itself; call `load_checkpoint` to evaluate or save another state.

    Args:
        args: The arguments, or a dict of them.
        model: A built module; or give `model_init`.
        model_init: Builds the module, called once after seeding.
        train_dataset: A dataset, or a ready-made loader (iterable with `batch_size`), which is used as it is.
        eval_dataset: Likewise, for evaluation.
        data_collator: Turns a list of examples into a batch dict; torch's default otherwise.
        processing_class: Tokenizer or similar; its `save_pretrained` is called beside saved weights.
        callbacks: Replaces the default callbacks (`Trainer.default_callbacks`).
        compute_loss_func: A sum-and-count loss; next-token cross-entropy otherwise.
        distributed_env: Rank and device; one process otherwise, on the accelerator if there is one.
        optimizer_factory: Called with the named parameters; AdamW from the arguments otherwise.
        lr_scheduler_factory: Called with the optimizer; the schedule of the arguments otherwise.
        parallelism: How to use the devices; `SingleDevice` otherwise.

    Raises:
        ConfigurationError: For arguments that cannot be used, before any work.
    """

    def __init__(
        self,
        args: TrainingArguments | Mapping[str, object],
        *,
        model: nn.Module | None = None,
        model_init: ModelInit | None = None,
        train_dataset: object | None = None,
        eval_dataset: object | None = None,
        data_collator: Collator | None = None,
        processing_class: Preprocessor | None = None,
        callbacks: Iterable[object] | None = None,
        compute_loss_func: TokenLoss | None = None,
        distributed_env: DistributedEnvInterface | None = None,
        optimizer_factory: OptimizerFactory | None = None,
        lr_scheduler_factory: SchedulerFactory | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        self.args = arguments_from_dict(TrainingArguments, args) if isinstance(args, Mapping) else args
        self._source = _model_source(model, model_init)
        self._train_data = train_dataset
        self._eval_data = eval_dataset
        self._collator = data_collator
        self.processing_class = processing_class
        self.loss = _checked_loss(compute_loss_func)
        self._optimizer_factory = optimizer_factory
        self._lr_scheduler_factory = lr_scheduler_factory
        self.parallel = parallelism or SingleDevice(distributed_env or StaticDistributedEnvironment())
        self.parallel.check(self.args)
        check_data(self.args, train_dataset, eval_dataset, data_collator)
        self.state = self._new_state()
        chosen = self.default_callbacks(self.args) if callbacks is None else callbacks
        self._events = CallbackHandler(chosen, self.args, self.state)
        self._prepared: Run | None = None
        self._resumed = False

    @staticmethod
    def default_callbacks(args: TrainingArguments) -> list[object]:
        """Throughput and MFU, then the progress table."""
        peak = device_peak_flops(args.matmul_dtype, value=args.peak_hardware_flops)
        return [DefaultMetrics(peak), ProgressCallback()]

    def train(self) -> TrainOutput:
        """Train to the end of the run, from the newest checkpoint if the arguments say so.

        Ctrl-C or SIGTERM finishes the step, saves and returns; `stop_cause` tells who ended the run early.

        Returns:
            The step reached and the final metrics.

        Raises:
            DataError: If there is no training data, or an epoch of it is empty.
        """
        if self._train_data is None:
            raise DataError("train() needs train_dataset; give one to the Trainer")
        self._events.begin_run()
        run = self._prepare()
        if not self._resumed:
            resume(run)
            self._resumed = True
        with matmul_precision(self.args), InterruptGuard() as interrupt:
            return TrainingLoop(run, Actions(run), interrupt).train()

    def evaluate(self, eval_dataset: object | None = None) -> dict[str, float]:
        """Score the evaluation set, or another one, with the model as it is.

        Returns:
            `eval_loss` (nats per counted token), `eval_tokens` and `eval_seconds`.

        Raises:
            DataError: If there is nothing to evaluate on.
        """
        run = self._prepare()
        data = run.evaluation
        if eval_dataset is not None:
            data = evaluation_data(eval_dataset, self.args, self.parallel, self._collator)
        if data is None:
            raise DataError("evaluate() needs an eval_dataset; give one here or to the Trainer")
        with matmul_precision(self.args):
            return Actions(run).evaluate(data)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write weights, config and processing class as a Hugging Face directory."""
        manager = self._prepare().manager
        manager.save_model(
            output_dir or self.args.output_dir, overwrite_output_dir=self.args.overwrite_output_dir
        )

    def save_checkpoint(self) -> None:
        """Save everything that a run needs to go on."""
        Actions(self._prepare()).save()

    def load_checkpoint(self, path: str | None = None) -> bool:
        """Go to the state of the checkpoint at `path`, or of the newest one in the output directory.

        Returns:
            Whether there was one to load.

        Raises:
            checkpoint_core.CheckpointError: If a path was given and there is no good checkpoint at it.
        """
        self._resumed = load(self._prepare(), path) is not None
        return self._resumed

    def add_callback(self, callback: object) -> None:
        """Add a callback, or an instance of a callback class."""
        self._events.add(callback)

    def pop_callback(self, callback: object) -> object | None:
        """Take out a callback by identity or exact class; None if there is none."""
        return self._events.pop(callback)

    def log(self, record: dict[str, object]) -> None:
        """Put an entry into the log and show it to the callbacks."""
        Actions(self._prepare()).log(record)

    def unwrapped_model(self) -> nn.Module:
        """The model without parallel wrappers."""
        self._prepare()
        return self.parallel.unwrapped_model()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None without training data."""
        return self._prepare().optimizer

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning-rate schedule; None without training data."""
        return self._prepare().scheduler

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that this run saved or began from; -1 if there is none."""
        return self._prepare().saved_step

    @property
    def stop_cause(self) -> StopCause | None:
        """The callback or signal that ended the run early; None for a run that reached its end."""
        return self._events.stop_cause

    def _prepare(self) -> Run:
        """Build everything at the first call; later calls return what was built."""
        if self._prepared is None:
            self._prepared = self._build()
            self._events.fire("on_init_end")
        return self._prepared

    def _build(self) -> Run:
        args, parallel, state = self.args, self.parallel, self.state
        seed_everything(args.seed)
        loader = None
        if self._train_data is not None:
            loader = train_loader(self._train_data, args, parallel, self._collator)
        evaluation = None
        if self._eval_data is not None:
            evaluation = evaluation_data(self._eval_data, args, parallel, self._collator)
        set_length(state, args, loader)
        parallel.build(self._source, args)
        optimizer, scheduler = self._build_optimizer() if loader is not None else (None, None)
        parallel.wrap()
        meter = ThroughputMeter()
        speed = RunSpeed(args.speed_metrics_start_step, self._samples_per_step())
        interval = Interval(parallel, state, meter, speed)
        components = RunComponents(
            parallel,
            RunProgress(state, interval, speed.samples_per_step),
            optimizer=optimizer,
            scheduler=scheduler,
            dataset=loader,
        )
        run = Run(
            args=args,
            state=state,
            events=self._events,
            parallel=parallel,
            loss=self.loss,
            meter=meter,
            speed=speed,
            interval=interval,
            manager=build_manager(args, parallel, components, self.processing_class),
            loader=loader,
            evaluation=evaluation,
            optimizer=optimizer,
            scheduler=scheduler,
        )
        self._share_with_callbacks(run)
        return run

    def _build_optimizer(self) -> tuple[Optimizer, LRScheduler]:
        named = self.parallel.named_parameters()
        optimizer = (
            self._optimizer_factory(named) if self._optimizer_factory else build_adamw(self.args, named)
        )
        if self._lr_scheduler_factory is not None:
            return optimizer, self._lr_scheduler_factory(optimizer)
        return optimizer, build_schedule(self.args, optimizer, self.state.max_steps)

    def _share_with_callbacks(self, run: Run) -> None:
        self._events.shared = {
            "model": self.parallel.unwrapped_model(),
            "processing_class": self.processing_class,
            "optimizer": run.optimizer,
            "lr_scheduler": run.scheduler,
            "train_dataloader": run.loader,
            "eval_dataloader": self._eval_data,
            "trainer": self,
        }

    def _new_state(self) -> TrainerState:
        args, env = self.args, self.parallel.env
        return TrainerState(
            logging_steps=args.logging_steps,
            eval_steps=args.eval_steps,
            save_steps=args.save_steps,
            train_batch_size=args.per_device_train_batch_size,
            max_steps=args.max_steps,
            num_train_epochs=args.num_train_epochs,
            max_eval_steps=args.max_eval_steps,
            num_processes=env.world_size,
            is_local_process_zero=env.local_rank == 0,
            is_world_process_zero=env.rank == 0,
        )

    def _samples_per_step(self) -> int:
        args = self.args
        return (
            args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * self.parallel.data_parallel_size
        )


def _model_source(model: nn.Module | None, model_init: ModelInit | None) -> nn.Module | ModelInit:
    if model is not None and model_init is not None:
        raise ConfigurationError("model_init", model_init, "was given beside model", "give one of the two")
    source = model if model is not None else model_init
    if source is None:
        raise ConfigurationError("model", None, "is missing, and so is model_init", "give one of the two")
    return source


def _checked_loss(loss: TokenLoss | None) -> TokenLoss:
    if loss is None:
        return CausalLMLoss()
    if not callable(loss) or not callable(getattr(loss, "count", None)):
        raise ConfigurationError(
            "compute_loss_func",
            loss,
            "must return a sum and tell how many positions count",
            "wrap a loss that returns a mean: MeanLoss(function, count)",
        )
    return loss
