"""Texts that the ranks of a pipeline write together, beside one process: time, processor time, and tokens."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from _timing import Stopwatch
from torch import Tensor

from dist_env import DistributedEnvInterface
from llama_pretrain import Llama, LlamaConfig, generate, preset
from trainer_pipeline import PipelineTrainer, PipelineTrainingArguments

SIZES = (1, 2, 4)
LENGTHS = (64, 128, 256)
"""Tokens to add."""
PROMPT = 16
LAYERS = 8
SEED = 1
ALONE, CACHED, WHOLE = "llama_pretrain.generate", "with a cache", "without a cache"


class Text(NamedTuple):
    """What a rank wrote.

    Attributes:
        wall: Seconds.
        cpu: Seconds of processor time of this rank.
        tokens: All tokens of the row, those of the prompt included.
    """

    wall: float
    cpu: float
    tokens: list[int]


def write(env: DistributedEnvInterface, *, lengths: tuple[int, ...], directory: str) -> dict[str, list[Text]]:
    """Continue one prompt greedily in every way, and once before anything is timed.

    Args:
        env: This rank.
        lengths: Tokens to add.
        directory: Where the trainer may write.

    Returns:
        By the way it was written, a text for each length.
    """
    trainer = _trainer(cast("Hashable", env), directory)
    prompt = torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(0))

    def together(count: int, *, use_cache: bool) -> Tensor:
        return trainer.pipeline_generate(prompt, max_new_tokens=count, do_sample=False, use_cache=use_cache)

    def alone(count: int) -> Tensor:
        model = trainer.unwrapped_model()
        if not isinstance(model, Llama):
            raise TypeError(f"one process has a {type(model).__name__}")
        return generate(model, prompt, max_new_tokens=count, temperature=0.0)

    ways: dict[str, Any] = {
        CACHED: lambda count: together(count, use_cache=True),
        WHOLE: lambda count: together(count, use_cache=False),
    }
    if env.world_size == 1:
        ways = {ALONE: alone, **ways}
    texts: dict[str, list[Text]] = {}
    for name, way in ways.items():
        way(4)
        texts[name] = [_timed(env, way, count) for count in lengths]
    return texts


def _timed(env: DistributedEnvInterface, way: Any, count: int) -> Text:
    gc.collect()
    if env.world_size > 1:
        dist.barrier()
    watch = Stopwatch()
    text = way(count)
    return Text(watch.wall(), watch.cpu(), text[0].tolist())


@cache
def _trainer(env: Any, directory: str) -> PipelineTrainer:
    """A trainer with weights as they are drawn; the same ones for any number of ranks."""
    args = PipelineTrainingArguments(
        output_dir=str(Path(directory) / f"generation-{env.world_size}"),
        use_cpu=True,
        seed=SEED,
        max_steps=1,
        save_strategy="no",
        resume_from_checkpoint=False,
    )
    return PipelineTrainer(args, model_init=_model, distributed_env=env, callbacks=[])


def config() -> LlamaConfig:
    """The shape `tiny` with more layers, and weights that are drawn wider, so that the text has variety."""
    return replace(preset("tiny", num_hidden_layers=LAYERS), initializer_range=0.3)


def _model() -> Llama:
    return Llama(config())


def check(told: dict[int, list[dict[str, list[Text]]]]) -> dict[str, int]:
    """Compare all texts of one round with those of `llama_pretrain.generate` in one process.

    Args:
        told: By the number of ranks, what each of them wrote.

    Returns:
        How many texts are the same, and how many different tokens the longest one has.

    Raises:
        SystemExit: A text is another one.
    """
    expected = [text.tokens for text in told[1][0][ALONE]]
    same = 0
    for size, by_rank in told.items():
        for rank, ways in enumerate(by_rank):
            for way, texts in ways.items():
                for text, tokens in zip(texts, expected, strict=True):
                    if text.tokens != tokens:
                        at = next(
                            i
                            for i, pair in enumerate(zip(text.tokens, tokens, strict=True))
                            if len({*pair}) > 1
                        )
                        raise SystemExit(
                            f"rank {rank} of {size}, {way}: the text differs from that of one process from "
                            f"position {at} on"
                        )
                    same += 1
    return {"same": same, "distinct_tokens": len({*max(expected, key=len)[PROMPT:]})}
