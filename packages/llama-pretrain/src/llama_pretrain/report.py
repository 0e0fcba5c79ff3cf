"""What `train` says before and after training."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn

from checkpoint_core import find_latest_checkpoint
from dataloader_dispatch import DocumentSource

from .model.generation import generate
from .model.llama import Llama
from .options import PretrainArguments
from .printable import printable
from .run_directory import CONFIG_NAME, RunDirectory
from .tokenizer import Tokenizer, unit_of
from .trainers import launch_command

SAMPLE_TEMPERATURE = 0.8


def announce(
    model: nn.Module,
    documents: DocumentSource,
    held_out: DocumentSource | None,
    args: PretrainArguments,
    processes: int,
    changes: Mapping[str, tuple[object, object]],
) -> None:
    """Say what is trained on what by how many, and which settings differ from those of the last start.

    Args:
        model: The whole model; its parameters may have no storage.
        documents: What it is trained on.
        held_out: What it is evaluated on.
        args: The settings.
        processes: How many train it.
        changes: Setting to its value at the last start, and now.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    source = "the Python standard library" if args.data is None else args.data
    kept = "none" if held_out is None else str(len(held_out))
    print(f"model      {args.model}, {parameters:,} parameters, {args.sequence_length} tokens a row")
    print(f"data       {source}: {len(documents)} documents to train on, {kept} held out")
    if args.trainer != "single":
        print(f"trainer    {args.trainer}, {_told_processes(args, processes)}")
    print(f"output     {args.output_dir}")
    for name, (old, new) in changes.items():
        print(f"changed    {name}: {old} at the last start, now {new}")
    print(flush=True)


def _told_processes(args: PretrainArguments, processes: int) -> str:
    if processes == 1:
        return f"one process, which is like single; for two: {launch_command(2, args.trainer)}"
    if args.trainer == "pipeline":
        pipeline = args.pipeline
        return f"{processes} processes, {pipeline.schedule} with {pipeline.n_microbatches} microbatches"
    return f"{processes} processes"


def say_how_to_continue(args: PretrainArguments, step: int, cause: str) -> None:
    """Say where an interrupted run stands and how it goes on."""
    newest = find_latest_checkpoint(args.output_dir)
    print(f"\nstopped by {cause} after step {step}.")
    if newest is None:
        print("No checkpoint was saved; the same command begins again.", flush=True)
    else:
        command = "same command without --fresh" if args.starts_fresh else "same command"
        print(f"The newest checkpoint is {newest}. The {command} continues from there.", flush=True)


def say_nothing_was_left(step: int) -> None:
    """Say that the run had reached its end before this start."""
    print(f"nothing left to train: the run has reached step {step}; a larger --max-steps goes on", flush=True)


def show_result(
    directory: RunDirectory, args: PretrainArguments, sample: str, tokenizer: Tokenizer, seconds: float
) -> None:
    """Print a sample of generated text, draw the loss curve, and say where everything lies."""
    if sample:
        print(f"\nsample, temperature {SAMPLE_TEMPERATURE}:\n")
        print(_indented(printable(sample)))
    losses = directory.held_out_losses(args)
    minutes, rest = divmod(round(seconds), 60)
    print(f"\ndone in {minutes} min {rest} s")
    if losses:
        print(f"  held-out loss   {losses[max(losses)]:.4f} nats per {unit_of(tokenizer)}")
    newest = find_latest_checkpoint(args.output_dir)
    if newest is not None:
        print(f"  checkpoint      {newest}")
    curve = directory.draw_curve(args)
    if curve is not None:
        print(f"  loss curve      {curve}")
    print(f"  log             {directory.log_file(args)}")
    print(f"  settings        {directory.path / CONFIG_NAME}")
    where = "" if args.output_dir == "runs/default" else f" --output-dir {args.output_dir}"
    print(f"try it            llama-pretrain generate {shlex.quote(args.prompt)}{where}", flush=True)


def write_sample(
    model: nn.Module, tokenizer: Tokenizer, args: PretrainArguments, device: torch.device
) -> str:
    """Text that the model writes at the end of a run, the same on all ranks; empty if none is wanted.

    Every rank calls it: where the model is sharded, each step of it needs all of them.

    Args:
        model: The `Llama`.
        tokenizer: Its tokenizer.
        args: prompt, sample_tokens and seed.
        device: Where it computes.
    """
    if not args.sample_tokens:
        return ""
    prompt = torch.tensor([list(tokenizer.encode(args.prompt))], device=device)
    generator = torch.Generator(device).manual_seed(args.seed)
    with _uncompiled(args):
        ids = generate(
            cast(Llama, model),
            prompt,
            max_new_tokens=args.sample_tokens,
            temperature=SAMPLE_TEMPERATURE,
            eos_token_id=tokenizer.eos_token_id,
            generator=generator,
        )
    return tokenizer.decode(ids[0].tolist())


def _uncompiled(args: PretrainArguments) -> AbstractContextManager[object]:
    """Each new length would compile a compiled model again; its eager form gives the same sample at once."""
    if not args.torch_compile:
        return nullcontext()
    return cast(AbstractContextManager[object], torch.compiler.set_stance("force_eager"))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
