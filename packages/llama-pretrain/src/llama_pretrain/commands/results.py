"""What is done with a trained model: the commands `eval` and `generate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from checkpoint_core import find_latest_checkpoint
from dataloader_dispatch import DocumentSource
from dist_env import DistributedEnvironment
from trainer_core import ConfigurationError, Trainer, TrainingArguments

from ..data import evaluation_loader, open_data
from ..model.config import CONFIG_FILE, LlamaConfig
from ..model.generation import generate
from ..model.interchange import load_pretrained
from ..options import PretrainArguments
from ..printable import printable
from ..run_directory import RunDirectory
from ..tokenizer import Tokenizer, load_tokenizer, unit_of
from ..train import prepare
from ..trainers import trainer_arguments

# Longest row that `eval` chooses by itself for a model of no run: scores stay comparable, and memory small.
_LONGEST_ROW = 1024


@dataclass(frozen=True, kw_only=True)
class ResultArguments:
    """Which trained model is meant."""

    output_dir: str = "runs/default"
    """Output directory of a run; its newest checkpoint is taken."""
    checkpoint: str | None = None
    """A checkpoint, an export, or any directory of a Hugging Face Llama, instead."""


@dataclass(frozen=True, kw_only=True)
class EvalArguments(ResultArguments):
    """Settings of `eval`."""

    data: str | None = None
    """Text to score, all of it; none: the documents that the run has held out."""
    sequence_length: int | None = None
    """Tokens of a row; none: as in the run, with --checkpoint the run whose directory it lies in; outside of
    a run the model's max_position_embeddings, but at most 1024."""
    per_device_eval_batch_size: int = 16
    """Rows at once."""
    max_eval_steps: int = -1
    """Most batches; -1: all of them."""


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ResultArguments):
    """Settings of `generate`."""

    prompt: str = "def "
    """Text to continue."""
    max_new_tokens: int = 120
    """Most tokens to add."""
    temperature: float = 0.8
    """Higher is more varied; 0 takes the most probable token each time."""
    top_k: int | None = None
    """Draw from this many most probable tokens only."""
    top_p: float | None = None
    """Draw from the fewest tokens whose probabilities reach this sum."""
    seed: int = 1
    """Another seed gives another text."""


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
                f"holds no {CONFIG_FILE}",
                "name a checkpoint or an exported model",
            )
        return Path(args.checkpoint)
    newest = find_latest_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if newest is None:
        raise ConfigurationError(
            "output_dir", args.output_dir, "holds no checkpoint", "train first, or name a --checkpoint"
        )
    return newest


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
            trainer_arguments(TrainingArguments, settings),
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
    directory = RunDirectory(args.output_dir)
    own = directory.arguments() if args.checkpoint is None else PretrainArguments(tokenizer=str(weights))
    own = replace(own, resume_from_checkpoint=False, eval_strategy="no", save_strategy="no")
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
            "data", None, "is needed with --checkpoint", "name text to score with --data"
        )
    experiment = prepare(own)
    directory.check_identity(experiment.args, experiment.subject)
    if experiment.held_out_documents is None:
        raise ConfigurationError(
            "data", None, "is needed: this run has held nothing out", "name text with --data"
        )
    return settings, experiment.tokenizer, experiment.held_out_documents


def _row_length(args: EvalArguments, weights: Path) -> int:
    """Return the tokens of a row: as asked for, else those of the run, else what the model can take."""
    positions = LlamaConfig.load(weights).max_position_embeddings
    length = args.sequence_length
    if length is None:
        run = RunDirectory(args.output_dir if args.checkpoint is None else weights.resolve().parent)
        length = run.arguments().sequence_length if run.holds_run() else min(positions, _LONGEST_ROW)
    if length > positions:
        raise ConfigurationError(
            "sequence_length",
            length,
            f"needs {length} positions, the model in {weights} has max_position_embeddings={positions}",
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
        raise ConfigurationError("prompt", args.prompt, "has no tokens", "give a text to continue")
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
