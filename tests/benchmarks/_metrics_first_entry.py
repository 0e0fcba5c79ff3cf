"""What `check_flops` adds once to a run: counting one step on a copy of the model without values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from _metrics_contenders import arguments
from _step_work import TINY, Size, Work

from dist_env import StaticDistributedEnvironment
from llama_pretrain import Llama, preset
from trainer_core import Trainer

POSITIONS = 64


def _of_preset(name: str) -> Size:
    config = preset(name)

    def build() -> torch.nn.Module:
        return Llama(config)

    return Size(f"llama-pretrain {name}", build, config.vocab_size, 1, POSITIONS)


MODELS = {"tiny": TINY, "llama-pretrain tiny": _of_preset("tiny"), "llama-pretrain 160m": _of_preset("160m")}


class _FirstEntry:
    """Notes how long the trainer takes from the end of the first step to its log record."""

    milliseconds = 0.0

    def on_step_end(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self._began = time.thread_time()

    def on_log_step(self, *_: object, **__: object) -> None:
        """Stop it."""
        self.milliseconds = (time.thread_time() - self._began) * 1e3


def measure_first_entry(directory: Path, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time up to the record of the first step, with the check and without."""
    told = {}
    for name in names:
        work = replace(Work.of(MODELS[name], 0, directory / name.replace(" ", "-")), steps=1)
        told[name] = {"with": _once(work, check=True), "without": _once(work, check=False)}
    return told


def _once(work: Work, *, check: bool) -> float:
    entry = _FirstEntry()
    Trainer(
        arguments(work, 1, check_flops=check),
        model=work.model(),
        train_dataset=work.examples,
        distributed_env=StaticDistributedEnvironment(),
        callbacks=[entry],
    ).train()
    return entry.milliseconds
