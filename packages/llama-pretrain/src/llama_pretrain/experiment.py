"""Everything that a run is made of: the shape of its model, its tokenizer, its documents and its trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from dataloader_dispatch import DocumentSource, data_fingerprint
from dist_env import DistributedEnvInterface
from perf_metrics import MEASURED, GoodputLogger, JsonLogger
from trainer_core import ConfigurationError, Trainer
from trainer_ddp import DDPTrainer
from trainer_fsdp2 import FSDP2Trainer
from trainer_pipeline import PipelineTrainer

from .arguments import PretrainArguments
from .console import LOGS_NAME, PROG
from .data import evaluation_loader, open_data, split_data, training_loader
from .model.config import CONFIG_FILE, LlamaConfig, preset
from .model.llama import Llama, has_weights
from .model.moe_weights import has_separate_experts
from .model.rope import scaling_for
from .tokenizer import Tokenizer, load_tokenizer

TRAINERS: Mapping[str, type[Trainer]] = {
    "single": Trainer,
    "ddp": DDPTrainer,
    "fsdp2": FSDP2Trainer,
    "pipeline": PipelineTrainer,
}
"""The setting `trainer` to the class, which takes `PretrainArguments`."""


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
    _check_experts_together(args.model)
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
    """Refuse a path that is not a checkpoint before anything is written; loading verifies its content."""
    if isinstance(wanted, str) and not (Path(wanted) / "manifest.json").is_file():
        raise ConfigurationError(
            "resume_from_checkpoint",
            wanted,
            "is not a checkpoint",
            "name a directory checkpoint-<step> of a run",
        )


def _check_experts_together(model: str) -> None:
    """Refuse weights whose experts are stored one by one: of a sharded model no rank could read its part."""
    if has_separate_experts(model):
        raise ConfigurationError(
            "model",
            model,
            "has weights with a tensor for each expert, and training reads one tensor for all of them",
            f"write them anew with: {PROG} import {model} DIRECTORY",
        )


def build_trainer(experiment: Experiment, env: DistributedEnvInterface) -> Trainer:
    """Put the trainer of a run together; it prints progress and writes the log file."""
    args, tokenizer, held_out = experiment.args, experiment.tokenizer, None
    if experiment.held_out_documents is None:
        args = replace(args, eval_strategy="no")
    else:
        held_out = evaluation_loader(experiment.held_out_documents, tokenizer, args, env)
    if args.peak_hardware_flops is None and args.fp8_recipe is None and env.device.type == "cpu":
        args = replace(args, peak_hardware_flops=MEASURED)  # which no table has: a first run shows an MFU too
    return TRAINERS[args.trainer](
        args,
        model_init=partial(Llama, experiment.config),
        initial_weights=args.model if starts_from_weights(args) else None,
        train_dataset=training_loader(experiment.train_documents, tokenizer, args, env),
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[*Trainer.default_callbacks(), JsonLogger(LOGS_NAME), GoodputLogger()],
        distributed_env=env,
    )


# Sizes that are multiples of this use matrix units well; 32000 is one.
_VOCABULARY_MULTIPLE = 64


def model_config(args: PretrainArguments, tokenizer: Tokenizer) -> LlamaConfig:
    """Return the shape of the model to train, checked against tokenizer and sequence length.

    A preset takes the vocabulary that `vocab_size` asks for, or that of the tokenizer, rounded up to a
    multiple of 64. A directory keeps its own. With `rope_scaling` it has as many positions as a row.

    Raises:
        ConfigurationError: If there is no such model, or it does not fit.
    """
    if (Path(args.model) / CONFIG_FILE).is_file():
        config = _checked_vocabulary(LlamaConfig.load(args.model), args, tokenizer)
    else:
        config = preset(
            args.model,
            vocab_size=_vocabulary(args, tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    config = _stretched(config, args)
    if args.sample_tokens:
        prompt = len(tokenizer.encode(args.prompt))
        _check_positions("sample_tokens", args.sample_tokens, prompt + args.sample_tokens, config)
    return config


def starts_from_weights(args: PretrainArguments) -> bool:
    """Whether the setting `model` is a directory that holds weights, not only a shape."""
    return has_weights(args.model)


def _vocabulary(args: PretrainArguments, tokenizer: Tokenizer) -> int:
    if args.vocab_size is None:
        return -(-tokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if args.vocab_size < tokenizer.vocab_size:
        raise ConfigurationError(
            "vocab_size",
            args.vocab_size,
            f"is less than the {tokenizer.vocab_size} ids of the tokenizer {args.tokenizer!r}",
            "raise it to at least that number, or leave it out",
        )
    return args.vocab_size


def _checked_vocabulary(config: LlamaConfig, args: PretrainArguments, tokenizer: Tokenizer) -> LlamaConfig:
    if args.vocab_size not in (None, config.vocab_size):
        raise ConfigurationError(
            "vocab_size",
            args.vocab_size,
            f"has no effect on the model in {args.model}, which keeps its {config.vocab_size} ids",
            "leave it out",
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigurationError(
            "tokenizer",
            args.tokenizer,
            f"has {tokenizer.vocab_size} ids, but the model in {args.model} has "
            f"vocab_size={config.vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    return replace(
        config,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _stretched(config: LlamaConfig, args: PretrainArguments) -> LlamaConfig:
    """The same model with room for a row; its rotary positions are scaled if a setting asks for that."""
    positions, wanted = config.max_position_embeddings, args.sequence_length
    before = config.rope_scaling
    if not args.rope_scaling:
        _check_row(config, args)
        return config
    if wanted <= positions:
        raise ConfigurationError(
            "rope_scaling",
            args.rope_scaling,
            f"has no effect, because rows of sequence_length={wanted} fit the model {args.model}, which has "
            f"max_position_embeddings={positions}",
            "leave it out",
        )
    if before is not None and not (before.rope_type == args.rope_scaling and before.stretches):
        own = before.to_dict()
        raise ConfigurationError(
            "rope_scaling",
            args.rope_scaling,
            f"cannot be combined with the scaling that the model {args.model} has already, {own}",
            f"use {before.rope_type!r}"
            if before.stretches
            else "lower sequence_length, or use another model",
        )
    scaling = scaling_for(args.rope_scaling, positions=positions, wanted=wanted, before=before)
    return replace(config, rope_scaling=scaling, max_position_embeddings=wanted)


def _check_row(config: LlamaConfig, args: PretrainArguments) -> None:
    before, fix = config.rope_scaling, "lower sequence_length, or choose a model with more positions"
    is_shape = (Path(args.model) / CONFIG_FILE).is_file() and not starts_from_weights(args)
    if not is_shape and (
        before is None or before.stretches
    ):  # a shape alone may have any number of positions
        kind = "yarn" if before is None else before.rope_type
        fix = f"{fix}, or stretch this one with rope_scaling, such as --rope-scaling {kind}"
    _check_positions("sequence_length", args.sequence_length, args.sequence_length, config, fix)


def _check_positions(
    setting: str, value: int, positions: int, config: LlamaConfig, fix: str | None = None
) -> None:
    if positions > config.max_position_embeddings:
        raise ConfigurationError(
            setting,
            value,
            f"needs {positions} positions, but the model has "
            f"max_position_embeddings={config.max_position_embeddings}",
            fix or f"lower {setting}, or choose a model with more positions",
        )
