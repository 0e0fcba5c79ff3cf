"""One rank of the low-bandwidth study: the default run of llama-pretrain in one mode."""

from __future__ import annotations

import glob
import json
import logging
import sys
import sysconfig
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

# A safe path leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from _low_bandwidth_meter import TrafficMeter
from _low_bandwidth_modes import Mode, modes

from dataloader_dispatch import DocumentSource, DocumentStream, StreamLoader, open_documents, split_documents
from dist_env import DistributedEnvInterface, DistributedEnvironment, gather_objects
from llama_pretrain import Llama, LlamaConfig, PretrainArguments, Tokenizer, load_tokenizer, preset
from trainer_ddp import DDPArguments, DDPTrainer, DDPTrainingArguments

_LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "pydoc_data",
    "encodings",
)
_EVALUATION_SHARDS = 32
_VOCABULARY_MULTIPLE = 64


def run(mode: Mode, options: dict[str, Any], env: DistributedEnvInterface) -> dict[str, Any]:
    """Train once.

    Args:
        mode: How the ranks work together.
        options: `steps`, `evaluate_every` so many of them, `evaluate_on` so many batches of each rank (-1:
            all), `seed`, and `directory` for what a run writes.
        env: Rank and world size.

    Returns:
        What rank 0 tells, fit for JSON.
    """
    args = PretrainArguments(
        trainer="ddp",
        output_dir=options["directory"],
        seed=options["seed"],
        max_steps=options["steps"],
        warmup_steps=min(PretrainArguments.warmup_steps, options["steps"] // 4),
        eval_steps=options["evaluate_every"],
        logging_steps=options["evaluate_every"],
        max_eval_steps=options["evaluate_on"],
        save_strategy="no",
        save_steps=DDPTrainingArguments.save_steps,
        # The buffers of this model are tables of constants.
        ddp=DDPArguments(broadcast_buffers=False),
        use_cpu=True,
        **mode.settings,  # type: ignore[arg-type]
    )
    meter = TrafficMeter(args.eval_steps)
    trainer = make_trainer(args, mode, meter, env)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "tokens": trainer.state.num_input_tokens_seen,
        "curve": meter.curve,
        "counted_bytes": sum(gather_objects(meter.counted, env)),
        "logged_bytes": sum(entry.get("communicated_bytes", 0) for entry in trainer.state.log_history),
        "loopback_bytes": meter.loopback,
        "parameters": sum(each.numel() for each in trainer.unwrapped_model().parameters()),
        "settings": mode.as_json(),
    }


def make_trainer(
    args: PretrainArguments, mode: Mode, meter: TrafficMeter, env: DistributedEnvInterface
) -> DDPTrainer:
    """The trainer that the command `train` makes of these settings, without its printing."""
    tokenizer = load_tokenizer(args.tokenizer)
    size = -(-tokenizer.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    config: LlamaConfig = preset(args.model, vocab_size=size)
    train, held_out = split_documents(standard_library(), args.held_out, args.seed)
    shards = min(len(held_out), _EVALUATION_SHARDS)
    told = {each.name: getattr(args, each.name) for each in fields(DDPTrainingArguments)}
    settings = DDPTrainingArguments(**told)
    return DDPTrainer(
        replace(settings, seed=args.seed + mode.seed_offset),
        model_init=partial(Llama, config),
        train_dataset=StreamLoader(
            rows(train, tokenizer, args, args.seed, args.shards), args.per_device_train_batch_size
        ),
        eval_dataset=StreamLoader(
            rows(held_out, tokenizer, args, 0, shards), args.per_device_eval_batch_size
        ),
        callbacks=[meter],
        distributed_env=env,
    )


def standard_library() -> DocumentSource:
    """The text that llama-pretrain learns from where none is named: the Python files, without tests."""
    root = glob.escape(sysconfig.get_path("stdlib"))
    return open_documents(str(Path(root) / "**" / "*.py"), exclude=_LEFT_OUT, undecodable="replace")


def rows(
    documents: DocumentSource, tokenizer: Tokenizer, args: PretrainArguments, seed: int, shards: int | None
) -> DocumentStream:
    """Packed rows of these documents; rank 0 reads them for all."""
    pad = tokenizer.pad_token_id
    return DocumentStream(
        documents,
        sequence_length=args.sequence_length,
        encode=tokenizer.encode,
        eos_token_id=tokenizer.eos_token_id,
        seed=seed,
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
        shards=shards,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    options = json.loads(sys.argv[1])
    with DistributedEnvironment(no_accelerator=True) as env:
        told = run(modes(options["steps"])[options["mode"]], options, env)
        if env.rank == 0:
            Path(sys.argv[2]).write_text(json.dumps(told))
