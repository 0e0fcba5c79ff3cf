"""What is done with a trained model: the commands `eval`, `generate`, `export` and `import`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint_core import find_latest_checkpoint
from dataloader_dispatch import DocumentSource
from dist_env import DistributedEnvironment, split_address
from trainer_core import ConfigurationError, Trainer, TrainingArguments, run_path

from ..arguments import PretrainArguments
from ..console import PROG, printable
from ..data import evaluation_loader, open_data
from ..experiment import prepare
from ..model.config import CONFIG_FILE, LlamaConfig
from ..model.llama import dtype_names, generate, has_weights, load_pretrained, save_pretrained
from ..run_directory import RunDirectory
from ..tokenizer import Tokenizer, has_tokenizer, load_tokenizer, unit_of
from .arguments import EvalArguments, ExportArguments, GenerateArguments, ImportArguments, ResultArguments

# Longest row that `eval` chooses by itself for a model of no run: scores stay comparable, and memory small.
_LONGEST_ROW = 1024
# The settings of a run that its figures depend on, or their speed; the others are about training. So are
# label_smoothing and z_loss: with what they add, a loss is neither nats per token nor that of a perplexity.
_OF_SCORING = (
    *("output_dir", "device", "use_cpu", "seed", "per_device_eval_batch_size", "max_eval_steps"),
    *("default_dtype", "mixed_precision", "fp8_recipe", "fp8_dim_alignment", "fp8_exclude", "fp8_emulate"),
    *("qat_recipe", "float32_matmul_precision", "sdpa_backend", "sdpa_set_priority"),
    "fused_loss",
)


def locate(args: ResultArguments) -> Path:
    """Return the directory that holds the weights.

    Raises:
        ConfigurationError: If there is none.
    """
    if args.checkpoint is not None:
        if not (Path(args.checkpoint) / CONFIG_FILE).is_file():
            raise ConfigurationError(
                "checkpoint",
                args.checkpoint,
                f"contains no {CONFIG_FILE}",
                "name a checkpoint or an exported model",
            )
        return Path(args.checkpoint)
    place, directory = args.output_dir, RunDirectory(run_path(args.output_dir))
    in_store = split_address(place) is not None
    if not in_store and directory.holds_run() and (own := directory.arguments()).saves_to_store:
        place, in_store = own.output_dir, True
    newest = find_latest_checkpoint(place) if in_store or Path(place).is_dir() else None
    if newest is not None and in_store:
        raise ConfigurationError(
            "output_dir",
            args.output_dir,
            "has its checkpoints in a store, and this command reads files",
            f"fetch the newest with `checkpoint-core export {newest} model`, and give --checkpoint model",
        )
    if newest is None:
        if Path(place).is_dir() and (part := find_latest_checkpoint(place, one_node=True)) is not None:
            raise _is_a_part("output_dir", args.output_dir, part)
        raise ConfigurationError(
            "output_dir",
            args.output_dir,
            "contains no checkpoint",
            "train first, or name one with --checkpoint",
        )
    return newest


def _is_a_part(setting: str, value: str, part: Path) -> ConfigurationError:
    return ConfigurationError(
        setting,
        value,
        f"holds only a part of {part.name}, of which other nodes have the other files",
        f"fetch it from the remote_dir of the run with `checkpoint-core export REMOTE_DIR/{part.name} "
        "model`, or copy the files of all nodes into one directory, and give that to --checkpoint",
    )


def evaluate(args: EvalArguments) -> dict[str, float]:
    """Score a model and print the result.

    Returns:
        `eval_loss` in nats per token, `eval_tokens` and `eval_seconds`.

    Raises:
        ConfigurationError: If there is no such model, or the held-out documents are no longer the same.
        DataError: If the data cannot be used.
    """
    weights = locate(args)
    settings, tokenizer, documents = _what_to_score(args, weights)
    loader = evaluation_loader(documents, tokenizer, settings)
    with DistributedEnvironment(always=False) as env:
        trainer = Trainer(
            TrainingArguments(**{name: getattr(settings, name) for name in _OF_SCORING}),
            model=load_pretrained(weights),
            eval_dataset=loader,
            callbacks=[],
            distributed_env=env,
        )
        metrics = trainer.evaluate()
    loss = metrics["eval_loss"]
    unit = unit_of(tokenizer)
    print(f"model       {weights}")
    print(f"scored      {int(metrics['eval_tokens']):,} tokens in {metrics['eval_seconds']:.1f} s")
    print(f"loss        {loss:.4f} nats per {unit}, {loss / math.log(2):.4f} bits per {unit}")
    print(f"perplexity  {math.exp(min(loss, 700)):.4f}", flush=True)
    return metrics


def _what_to_score(args: EvalArguments, weights: Path) -> tuple[PretrainArguments, Tokenizer, DocumentSource]:
    """Return the settings, the tokenizer and the documents of an evaluation."""
    directory = RunDirectory(run_path(args.output_dir))
    own = directory.arguments() if args.checkpoint is None else PretrainArguments(tokenizer=str(weights))
    own = replace(own, resume_from_checkpoint=False, max_eval_samples=None)
    settings = replace(
        own,
        sequence_length=_row_length(args, weights),
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        max_eval_steps=args.max_eval_steps,
    )
    if args.data is not None:
        settings = replace(settings, data=args.data)
        return settings, load_tokenizer(settings.tokenizer), open_data(settings)
    if args.checkpoint is not None:
        raise ConfigurationError(
            "data", None, "is required with --checkpoint", "name text to score with --data"
        )
    experiment = prepare(own)
    directory.check_identity(experiment.args, experiment.subject)
    if experiment.held_out_documents is None:
        raise ConfigurationError(
            "data", None, "is required, because this run has held out no text", "name text with --data"
        )
    return settings, experiment.tokenizer, experiment.held_out_documents


def _row_length(args: EvalArguments, weights: Path) -> int:
    """Return the tokens of a row: as asked for, else those of the run, else what the model can take."""
    positions = LlamaConfig.load(weights).max_position_embeddings
    length = args.sequence_length
    if length is None:
        run = RunDirectory(run_path(args.output_dir) if args.checkpoint is None else weights.resolve().parent)
        length = run.arguments().sequence_length if run.holds_run() else min(positions, _LONGEST_ROW)
    if length > positions:
        raise ConfigurationError(
            "sequence_length",
            length,
            f"needs {length} positions, but the model in {weights} has max_position_embeddings={positions}",
            f"use a --sequence-length of at most {positions}",
        )
    return length


def generate_text(args: GenerateArguments) -> str:
    """Continue a text with a trained model, print it and return it.

    Raises:
        ConfigurationError: If there is no such model, or a setting cannot be used.
    """
    weights = locate(args)
    tokenizer = load_tokenizer(str(weights))
    prompt = list(tokenizer.encode(args.prompt))
    if not prompt:
        raise ConfigurationError(
            "prompt", args.prompt, "has no tokens", "give a text to continue, such as 'Once upon a time'"
        )
    model, device = load_pretrained(weights), DistributedEnvironment().device
    ids = generate(
        model.to(device),
        torch.tensor([prompt], dtype=torch.int64, device=device),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        eos_token_id=tokenizer.eos_token_id,
        generator=torch.Generator(device).manual_seed(args.seed),
    )
    text = tokenizer.decode(ids[0].tolist())
    print(printable(text), flush=True)
    return text


def export(args: ExportArguments) -> Path:
    """Write a trained model as a Hugging Face directory and return it.

    Raises:
        ConfigurationError: If there is no such model, the dtype is unknown, or the directory is not empty.
        OSError: If the directory cannot be written.
    """
    target = _target(args.directory, args.dtype)
    weights = locate(args)
    model = load_pretrained(weights)
    save_pretrained(model, target, dtype=args.dtype, tokenizer=load_tokenizer(str(weights)))
    reader = model.config.architecture
    print(f"wrote {target}: {weights} as {args.dtype}, for transformers' {reader}", flush=True)
    return target


def import_model(args: ImportArguments) -> Path:
    """Take over a Hugging Face Llama: check that this model computes it, and write it for `train`.

    Training can begin from the source itself as well (`--model`); this finds out beforehand whether it fits,
    and leaves one file in the dtype that is wanted.

    Raises:
        ConfigurationError: If the source is not a Llama that is implemented, holds weights that only
            unpickling could read, or the directory is not empty.
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
            "source", str(source), f"contains no {CONFIG_FILE}", "name the directory of a Hugging Face Llama"
        )
    pickles = sorted(path.name for path in source.glob("*.bin"))
    if pickles and not has_weights(source):
        raise ConfigurationError(
            "source",
            str(source),
            f"has its weights in {pickles[0]}, which only unpickling could read, and that can run code",
            "write them as safetensors first, with save_pretrained(directory) of transformers",
        )
