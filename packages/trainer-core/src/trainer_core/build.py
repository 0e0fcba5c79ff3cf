"""How a run is put together from what the user gave."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from dist_env import ParallelLayout, get_logger
from perf_metrics import ThroughputMeter

from .arguments import TrainingArguments
from .arguments.config import plain_model_config
from .checkpointing import OutputLease, build_manager
from .data.loaders import Batch, EvaluationSets, evaluation_sets, train_loader
from .distributed.build import build_model, compile_built, make_loss
from .distributed.ranks import BatchPlacement, Ranks
from .distributed.transforms import BuiltModel, ModelTransform
from .errors import ConfigurationError
from .inputs import TrainerInputs
from .loss import TokenLoss
from .metrics.log_window import FlopsAccount, MetricAccumulator, RunSpeed
from .model import CompileCache, RecompileCounter
from .optimization import (
    NamedParameters,
    OptimizerInBackward,
    average_weights,
    build_optimizer,
    build_schedule,
    is_callback,
    optimizer_table,
)
from .periodic import say_length, set_length
from .precision import build_scaler
from .run import GarbagePolicy, Run
from .run_state import CallbackStates, Hyperparameters, RunComponents, RunProgress, ScheduleState
from .state import CallbackHandler, TrainerState
from .update import build_update


def seed_rank(args: TrainingArguments, layout: ParallelLayout, rank: int) -> None:
    """Give each rank generators of its own, once all ranks have built the same model, if asked for.

    Ranks that differ in the dimension `tensor` only have the same: what they do not divide, such as a mask of
    dropout on hidden states, each of them computes, and it has to be equal.
    """
    if args.seed_per_rank:
        rank -= layout.coordinates(rank)["tensor"]  # the innermost dimension
        seed_everything((args.seed + rank) % 2**64)


def seed_everything(seed: int) -> None:
    """Seed python, torch (all devices) and, where it is in use, numpy; -1 leaves all alone."""
    if seed < 0:
        return
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


logger = get_logger(__name__)


def assemble(
    args: TrainingArguments,
    ranks: Ranks,
    transforms: Sequence[ModelTransform],
    placement: BatchPlacement,
    state: TrainerState,
    events: CallbackHandler,
    parts: TrainerInputs,
    *,
    resumes: bool,
    lease: OutputLease,
) -> Run:
    """Build loaders, model, optimizer and all that belongs to a run, in this order.

    Args:
        args: The arguments.
        ranks: The ranks.
        transforms: How they use the model, in order.
        placement: Which rank gets which batches.
        state: Receives the length of the run.
        events: Where a schedule that is a callback is added.
        parts: What the user gave.
        resumes: Whether a checkpoint will be loaded into it.
        lease: What must be held to write to the output directory.
    """
    loader, evaluation = _loaders(args, ranks, placement, parts)
    set_length(state, args, loader)
    say_length(state, args)
    follow = resumes or parts.initial_weights is not None
    built, loss = build_model_and_loss(args, ranks, transforms, parts, skip_init=follow)
    optimizer, scheduler = None, None
    if loader is not None:
        optimizer = build_optimizer_of(args, built, parts)
        average_weights(args, built, optimizer)
        scheduler = build_scheduler(args, optimizer, state, parts)
        if scheduler is not None and is_callback(scheduler):
            events.add(scheduler)
    built.attach(optimizer)
    # A rank that has failed alone by now would leave the others waiting for it where none can say why.
    ranks.check_same({"optimizer": type(optimizer).__name__})
    seed_rank(args, ranks.layout, ranks.env.rank)
    meter = ThroughputMeter()
    speed = RunSpeed(args.speed_metrics_start_step, samples_per_step(args, ranks))
    flops = FlopsAccount(built, args)
    scaler = build_scaler(args, built.model, ranks.device)
    # As `build_update` has it: a scaler's overflow concerns its own step, and a step in backward is done.
    halts = args.nonfinite_policy != "skip" and scaler is None and not args.fuse_optim_with_backward
    log_window = MetricAccumulator(ranks, state, meter, speed, flops, traffic=built.traffic, halts=halts)
    schedule = None if scheduler is None else ScheduleState(scheduler)
    options = None if optimizer is None else Hyperparameters(optimizer)
    config = plain_model_config(built.model)
    progress = RunProgress(args, state, log_window, speed, options=options, model_config=config)
    components = RunComponents(
        built,
        placement,
        progress,
        callbacks=CallbackStates(events),
        optimizer=optimizer,
        schedule=schedule,
        scaler=scaler,
        dataset=loader,
        further=parts.state_components,
    )
    return Run(
        args=args,
        state=state,
        events=events,
        ranks=ranks,
        built=built,
        placement=placement,
        loss=loss,
        meter=meter,
        speed=speed,
        log_window=log_window,
        flops=flops,
        progress=progress,
        manager=build_manager(args, ranks, components, parts.preprocessor, lease.directory),
        lease=lease,
        loader=loader,
        evaluation=evaluation,
        optimizer=optimizer,
        scheduler=scheduler,
        schedule=schedule,
        update=None if optimizer is None else build_update(args, built, optimizer, scaler),
        garbage=GarbagePolicy(args, ranks.device),
        recompiles=RecompileCounter(args),
        compile_cache=CompileCache(args, ranks),
        eval_metrics=parts.eval_metrics,
    )


def build_model_and_loss(
    args: TrainingArguments,
    ranks: Ranks,
    transforms: Sequence[ModelTransform],
    parts: TrainerInputs,
    *,
    skip_init: bool,
) -> tuple[BuiltModel, TokenLoss]:
    """Build what this rank holds of the model, compiled if asked to, and the loss that belongs to it."""
    built = build_model(
        parts.model, args, ranks, transforms, skip_init=skip_init, recompute_fn=parts.recompute_fn
    )
    with ranks.failing_together("make its loss"):  # which a stage without the end of the model has not
        loss = make_loss(built, parts.loss, parts.fused_loss)
    compile_built(built)
    return built, loss


def _loaders(
    args: TrainingArguments, ranks: Ranks, placement: BatchPlacement, parts: TrainerInputs
) -> tuple[Iterable[Batch] | None, EvaluationSets | None]:
    loader = evaluation = None
    if parts.train_data is not None:
        loader = train_loader(parts.train_data, args, ranks, placement, parts.collator)
    if parts.eval_data is not None:
        evaluation = evaluation_sets(parts.eval_data, args, ranks, placement, parts.collator)
    return loader, evaluation


def build_optimizer_of(args: TrainingArguments, built: BuiltModel, parts: TrainerInputs) -> Optimizer:
    """The optimizer of what this rank holds of the model."""
    model, named = built.model, list(built.named_parameters())
    among = {name: parameter.requires_grad for name, parameter in built.meta_model.named_parameters()}

    def build(some: NamedParameters) -> Optimizer:
        return build_optimizer(
            args,
            model,
            named_parameters=some,
            groups=parts.optimizer_groups,
            factory=parts.optimizer,
            among=None if args.fuse_optim_with_backward else among,
            whole_model=built.meta_model,
        )

    optimizer = OptimizerInBackward(named, build) if args.fuse_optim_with_backward else build(named)
    if args.debug_optimizer_groups:
        table = optimizer_table(optimizer, model, named_parameters=named, groups=parts.optimizer_groups)
        logger.info("optimizer groups:\n%s", table)
    return optimizer


def build_scheduler(
    args: TrainingArguments, optimizer: Optimizer, state: TrainerState, parts: TrainerInputs
) -> LRScheduler | None:
    """The learning-rate schedule, if there is to be one; the state knows how long the run is.

    Raises:
        ConfigurationError: If a factory returns what does not drive this optimizer, step by step.
    """
    if parts.scheduler is not None:
        return _checked_scheduler(parts.scheduler(optimizer), optimizer)
    if not args.lr_scheduler_type or args.optim == "schedule_free_adamw":
        return None
    return build_schedule(args, optimizer, state.max_steps)


def _checked_scheduler(scheduler: object, optimizer: Optimizer) -> LRScheduler:
    """What a factory returned, if it can set the rates of each step."""
    rule, remedy = "", ""
    # A class of one's own may step without a metric, as `PlateauSchedule` does.
    if isinstance(scheduler, ReduceLROnPlateau) and type(scheduler).step is ReduceLROnPlateau.step:
        rule = "steps on a metric, and schedules step after each update"
        remedy = 'leave the factory out and set lr_scheduler_type="reduce_lr_on_plateau"'
    elif not isinstance(scheduler, LRScheduler):
        rule, remedy = "is not a torch LRScheduler", "return one from the factory"
    elif scheduler.optimizer is not optimizer:
        rule = "drives another optimizer than the one that trains, whose rates would stay as they are"
        remedy = "build it around the optimizer that the factory is called with"
    if not isinstance(scheduler, LRScheduler) or rule:
        raise ConfigurationError("lr_scheduler_factory", type(scheduler).__name__, rule, remedy)
    return scheduler


def samples_per_step(args: TrainingArguments, ranks: Ranks) -> int:
    """Examples of one optimizer step over all ranks."""
    per_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return per_rank * ranks.data_parallel_size
