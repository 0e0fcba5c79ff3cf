"""The command `train`: check everything, train, show the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from checkpoint_core import CheckpointError, LostRankError
from dataloader_dispatch import DocumentSource, data_fingerprint
from dist_env import (
    DistributedEnvInterface,
    DistributedEnvironment,
    barrier,
    broadcast_object,
    main_process_first,
)
from perf_metrics import JsonLogger
from trainer_core import ConfigurationError, Trainer

from .data import evaluation_loader, open_data, split_data, training_loader
from .launch import report_ownership
from .model.config import LlamaConfig
from .model.llama import Llama
from .model_choice import model_config, starts_from_weights
from .options import PretrainArguments
from .report import announce, say_how_to_continue, say_nothing_was_left, show_result, write_sample
from .run_directory import LOGS_NAME, RunDirectory, refuse_if_in_use
from .sessions import describe_session
from .tokenizer import Tokenizer, load_tokenizer
from .trainers import TRAINERS, arguments_class, check_processes, trainer_arguments


class BrokenRunError(RuntimeError):
    """A run that had begun could not go on, as when the disk is full: other input would not change that."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that a run is made of, loaded and checked; nothing is written yet."""

    args: PretrainArguments
    tokenizer: Tokenizer
    config: LlamaConfig
    train_documents: DocumentSource
    held_out_documents: DocumentSource | None
    subject: Mapping[str, object]
    """What is trained on what, as plain JSON values; see `RunDirectory`."""


def prepare(args: PretrainArguments) -> Experiment:
    """Load what the settings name.

    Raises:
        ConfigurationError: If a setting cannot be used.
        DataError: If the data cannot be used.
    """
    _check_resume_path(args.resume_from_checkpoint)
    tokenizer = load_tokenizer(args.tokenizer)
    config = model_config(args, tokenizer)
    documents = open_data(args)
    train_documents, held_out = split_data(documents, args)
    subject = {
        "model": asdict(config),
        "initial_weights": args.model if starts_from_weights(args) else None,
        "tokenizer": {"name": args.tokenizer, "vocab_size": tokenizer.vocab_size},
        "data": data_fingerprint(documents),
    }
    return Experiment(
        args=args,
        tokenizer=tokenizer,
        config=config,
        train_documents=train_documents,
        held_out_documents=held_out,
        subject=subject,
    )


def _check_resume_path(wanted: bool | str) -> None:
    """Refuse a path that is no checkpoint before anything is written; its content is verified on loading."""
    if isinstance(wanted, str) and not (Path(wanted) / "manifest.json").is_file():
        raise ConfigurationError(
            "resume_from_checkpoint",
            wanted,
            "is no checkpoint",
            "name a directory checkpoint-<step> of a run",
        )


def build_trainer(experiment: Experiment, env: DistributedEnvInterface) -> Trainer:
    """Put the trainer of a run together; it prints progress and writes the log file."""
    args, tokenizer = experiment.args, experiment.tokenizer
    chosen = TRAINERS[args.trainer]
    told = arguments_class(args.trainer, shards_stages=args.shards_stages)
    settings = replace(trainer_arguments(told, args), logging_dir=str(args.log_path))
    held_out = None
    if experiment.held_out_documents is None:
        settings = replace(settings, eval_strategy="no")
    else:
        held_out = evaluation_loader(experiment.held_out_documents, tokenizer, args, env)
    return chosen(
        settings,
        model_init=partial(Llama, experiment.config),
        initial_weights=args.model if starts_from_weights(args) else None,
        train_dataset=training_loader(experiment.train_documents, tokenizer, args, env),
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[*Trainer.default_callbacks(), JsonLogger(LOGS_NAME)],
        distributed_env=env,
    )


def train(args: PretrainArguments) -> int:
    """Train, or go on training, and leave logs, figures and checkpoints in the output directory.

    In a job of several processes each one checks everything; only rank 0 prints and writes.

    Args:
        args: The settings as resolved.

    Returns:
        Exit code, the same on all ranks: 0, or 75 when Ctrl-C, a signal or the time limit ended the run early
        and it can go on.

    Raises:
        ConfigurationError: If a setting cannot be used, or the directory belongs to another run, or one that
            has not ended uses it.
        DataError: If the data cannot be used.
        CheckpointError: If a checkpoint cannot be read.
        OSError: If the output directory may not be written.
        BrokenRunError: If a file cannot be written once training has begun, as on a full disk.
        RankFailedError: If another rank failed.
        RankTimeoutError: If another rank did not come.
    """
    started = time.perf_counter()
    refuse_if_in_use(args.output_dir)
    env = DistributedEnvironment(always=False, no_accelerator=args.use_cpu or args.device == "cpu")
    check_processes(args.trainer, args.mesh, env.world_size)
    experiment = prepare(args)
    directory = RunDirectory(args.output_dir)
    changes = directory.check(args, experiment.subject)
    # What is wrong with the input is said before the ranks wait for each other. Once they have met, none
    # checks the directory any more, and rank 0 may write to it.
    with env:
        trainer = build_trainer(experiment, env)
        trainer.ranks.check_same(experiment.subject)
        with trainer.owns_output_dir():
            report_ownership()
            return _train_on(env, trainer, experiment, directory, changes, started)


def _train_on(
    env: DistributedEnvInterface,
    trainer: Trainer,
    experiment: Experiment,
    directory: RunDirectory,
    changes: Mapping[str, tuple[object, object]],
    started: float,
) -> int:
    args, speaks = experiment.args, env.rank == 0
    # Builds model, optimizer and schedule: what they refuse must come before the directory is claimed.
    model = trainer.unwrapped_model()
    if speaks:
        documents = experiment.train_documents, experiment.held_out_documents
        announce(trainer.meta_model(), *documents, args, env.world_size, changes)
    with main_process_first(env) as goes_first:
        if goes_first:
            directory.begin(args, experiment.subject, describe_session(args, env))
    begun = _Begun()
    trainer.add_callback(begun)
    try:
        output = trainer.train()
    except (CheckpointError, OSError) as error:
        if not begun.happened or isinstance(error, LostRankError):
            raise
        raise BrokenRunError(str(error)) from error
    if trainer.stop_cause is not None:
        if speaks:
            say_how_to_continue(args, output.global_step, trainer.stop_cause.name)
        return trainer.exit_code
    if speaks and output.global_step == trainer.state.session_start_step:
        say_nothing_was_left(output.global_step)
    if _lacks_evaluation(env, experiment, directory, output.global_step):
        trainer.evaluate()
    with trainer.ranks.lost_rank_errors("showing the result"), trainer.synced_weights():
        with trainer.generating():
            sample = write_sample(model, experiment.tokenizer, args, env.device)
        if speaks:
            seconds = time.perf_counter() - started
            show_result(directory, args, sample, experiment.tokenizer, seconds)
    # A rank that left earlier would report success for a job that may still fail.
    barrier(env, tag="the end of the run")
    return 0


class _Begun:
    """Knows whether the first step was begun: a callback."""

    happened = False

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.happened = True


def _lacks_evaluation(
    env: DistributedEnvInterface, experiment: Experiment, directory: RunDirectory, step: int
) -> bool:
    """Whether the last step was not evaluated; by the log as rank 0 sees it, for all ranks."""
    if experiment.held_out_documents is None:
        return False
    scored = env.rank == 0 and step in directory.held_out_losses(experiment.args)
    return not broadcast_object(scored, env)
