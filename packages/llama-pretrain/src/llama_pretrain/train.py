"""The command `train`: check everything, train, show the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from dataloader_dispatch import DocumentSource, data_fingerprint
from dist_env import DistributedEnvInterface, DistributedEnvironment
from perf_metrics import JsonLogger
from trainer_core import ConfigurationError, Trainer

from .config import LlamaConfig
from .data import evaluation_loader, open_data, split_data, training_loader
from .model_choice import model_config, new_model, starts_from_weights
from .options import PretrainArguments
from .report import announce, say_how_to_continue, say_nothing_was_left, show_result
from .run_directory import LOGS_NAME, RunDirectory
from .tokenizer import Tokenizer, load_tokenizer


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
    held_out = None
    if experiment.held_out_documents is None:
        args = replace(args, eval_strategy="no")
    else:
        held_out = evaluation_loader(experiment.held_out_documents, tokenizer, args)
    args = replace(args, logging_dir=str(args.log_path))
    return Trainer(
        args,
        model_init=partial(new_model, args, experiment.config),
        train_dataset=training_loader(experiment.train_documents, tokenizer, args),
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[*Trainer.default_callbacks(args), JsonLogger(LOGS_NAME)],
        distributed_env=env,
    )


def train(args: PretrainArguments) -> int:
    """Train, or go on training, and leave logs, figures and checkpoints in the output directory.

    Args:
        args: The settings as resolved.

    Returns:
        Exit code: 0, or 75 when Ctrl-C, a signal or the time limit ended the run early and it can go on.

    Raises:
        ConfigurationError: If a setting cannot be used, or the directory belongs to another run.
        DataError: If the data cannot be used.
        CheckpointError: If a checkpoint cannot be written or read.
        OSError: If the disk is full, or may not be written.
    """
    with DistributedEnvironment(always=False) as env:
        return _train_on(env, args)


def _train_on(env: DistributedEnvInterface, args: PretrainArguments) -> int:
    started = time.perf_counter()
    experiment = prepare(args)
    trainer = build_trainer(experiment, env)
    directory = RunDirectory(args.output_dir)
    changes = directory.check(args, experiment.subject)
    announce(experiment.config, experiment.train_documents, experiment.held_out_documents, args, changes)
    # Builds model, optimizer and schedule: what they refuse must come before the directory is claimed.
    trainer.unwrapped_model()
    directory.begin(args, experiment.subject)
    output = trainer.train()
    if trainer.stop_cause is not None:
        say_how_to_continue(args, output.global_step, trainer.stop_cause.name)
        return trainer.exit_code
    if output.global_step == trainer.state.session_start_step:
        say_nothing_was_left(output.global_step)
    if experiment.held_out_documents is not None and output.global_step not in directory.held_out_losses(
        args
    ):
        trainer.evaluate()
    show_result(
        directory, args, trainer.unwrapped_model(), experiment.tokenizer, time.perf_counter() - started
    )
    return 0
