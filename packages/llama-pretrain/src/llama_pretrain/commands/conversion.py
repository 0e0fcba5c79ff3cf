"""Models to and from others' directories: the commands `export` and `import`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer_core import ConfigurationError

from ..model.config import CONFIG_FILE
from ..model.interchange import dtype_names, has_weights, load_pretrained, save_pretrained
from ..program import PROG
from ..tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from .results import ResultArguments, locate


@dataclass(frozen=True, kw_only=True)
class ExportArguments(ResultArguments):
    """Settings of `export`."""

    directory: str
    """Where to write config.json, model.safetensors and the tokenizer; must be new or empty."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Settings of `import`."""

    source: str
    """Directory of a Hugging Face Llama: config.json, safetensors in one or several files, a tokenizer."""
    directory: str
    """Where to write it; must be new or empty."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""


def export(args: ExportArguments) -> Path:
    """Write a trained model as a Hugging Face directory and return it.

    Raises:
        ConfigurationError: If there is no such model, the dtype is unknown, or the directory is not empty.
        OSError: If the directory cannot be written.
    """
    target = _target(args.directory, args.dtype)
    weights = locate(args)
    save_pretrained(
        load_pretrained(weights), target, dtype=args.dtype, tokenizer=load_tokenizer(str(weights))
    )
    print(f"wrote {target}: {weights} as {args.dtype}, for transformers' LlamaForCausalLM", flush=True)
    return target


def import_model(args: ImportArguments) -> Path:
    """Take over a Hugging Face Llama: check that this model computes it, and write it for `train`.

    Training can begin from the source itself as well (`--model`); this finds out beforehand whether it fits,
    and leaves one file in the dtype that is wanted.

    Raises:
        ConfigurationError: If the source is no Llama that is implemented, holds weights that only unpickling
            could read, or the directory is not empty.
        CheckpointError: If weights are missing, damaged, or do not fit the configuration.
        OSError: If the directory cannot be written.
    """
    target = _target(args.directory, args.dtype)
    source = Path(args.source)
    _check_source(source)
    model = load_pretrained(source)
    tokenizer: Tokenizer | None = load_tokenizer(args.source) if has_tokenizer(source) else None
    save_pretrained(model, target, dtype=args.dtype, tokenizer=tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    own = f" --tokenizer {target}" if tokenizer is not None else ""
    print(f"wrote {target}: {source}, {parameters:,} parameters as {args.dtype}")
    if tokenizer is None:
        print("tokenizer       none in the source: name one with --tokenizer")
    print(f"train from it   {PROG} train --model {target}{own} --output-dir runs/mine", flush=True)
    return target


def _target(directory: str, dtype: str) -> Path:
    if dtype not in dtype_names():
        raise ConfigurationError(
            "dtype", dtype, f"must be one of {', '.join(dtype_names())}", "choose one of these"
        )
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigurationError("directory", str(target), "is not an empty directory", "choose another one")
    return target


def _check_source(source: Path) -> None:
    if not (source / CONFIG_FILE).is_file():
        raise ConfigurationError(
            "source", str(source), f"holds no {CONFIG_FILE}", "name the directory of a Hugging Face Llama"
        )
    pickles = sorted(path.name for path in source.glob("*.bin"))
    if pickles and not has_weights(source):
        raise ConfigurationError(
            "source",
            str(source),
            f"has its weights in {pickles[0]}, which only unpickling could read, and that runs code",
            "let transformers write them as safetensors first: save_pretrained(directory)",
        )
