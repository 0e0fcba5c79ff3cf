"""From the settings of a run to the shape of its model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer_core import ConfigurationError

from .model.config import CONFIG_FILE, LlamaConfig
from .model.interchange import has_weights
from .model.presets import preset
from .options import PretrainArguments
from .tokenizer import Tokenizer

# Sizes that are multiples of this use matrix units well; 32000 is one.
_VOCABULARY_MULTIPLE = 64


def model_config(args: PretrainArguments, tokenizer: Tokenizer) -> LlamaConfig:
    """Return the shape of the model to train, checked against tokenizer and sequence length.

    A preset takes the vocabulary that `vocab_size` asks for, or that of the tokenizer, rounded up to a
    multiple of 64. A directory keeps its own.

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
    _check_positions("sequence_length", args.sequence_length, args.sequence_length, config)
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
            "raise it, or leave it out",
        )
    return args.vocab_size


def _checked_vocabulary(config: LlamaConfig, args: PretrainArguments, tokenizer: Tokenizer) -> LlamaConfig:
    if args.vocab_size is not None:
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
            f"has {tokenizer.vocab_size} ids, the model in {args.model} has vocab_size={config.vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    return replace(
        config,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _check_positions(setting: str, value: int, positions: int, config: LlamaConfig) -> None:
    if positions > config.max_position_embeddings:
        raise ConfigurationError(
            setting,
            value,
            f"needs {positions} positions, the model has max_position_embeddings="
            f"{config.max_position_embeddings}",
            f"lower {setting}, or choose a model with more positions",
        )
