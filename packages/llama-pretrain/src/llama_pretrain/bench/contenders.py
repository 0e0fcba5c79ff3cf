"""Who takes part: a name, the module that trains, and the distributions that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from torch import nn

from trainer_core import ConfigurationError, suggest

from ..program import PROG
from .work import Work

Train = Callable[[Work, nn.Module], object]
"""Trains a model on some work, which its second argument is left with."""
BASELINE = "torch"
INSTALL = f"pip install '{PROG}[bench]'"


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        name: Its name on the command line.
        label: Its name in the table.
        module: Where its function `train` is, below `llama_pretrain.bench`.
        distributions: What it needs, by their names in a package registry.
        in_bf16: What is unlike the others in mixed precision.
    """

    name: str
    label: str
    module: str
    distributions: tuple[str, ...]
    in_bf16: str = ""

    def missing(self) -> list[str]:
        """Distributions that it needs and that are not installed."""
        return [name for name in self.distributions if not _is_installed(name)]

    def train(self) -> Train:
        """Import its library; returns its function."""
        return cast(Train, import_module(f"llama_pretrain.bench.{self.module}").train)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("ours", "trainer-core", "ours", ("trainer-core",)),
        Contender("torch", "plain torch loop", "torch_loop", ("torch",)),
        Contender("accelerate", "Accelerate", "accelerate_loop", ("accelerate",)),
        Contender("hf", "Hugging Face Trainer", "hf_trainer", ("transformers", "accelerate")),
        Contender(
            "lightning",
            "Lightning",
            "lightning_trainer",
            ("lightning",),
            in_bf16="its AdamW is not fused, because Lightning does not clip gradients of a fused one then",
        ),
    )
}


def chosen(names: Sequence[str]) -> tuple[list[Contender], list[Contender]]:
    """Return those to run, and those that would run if they were installed.

    Args:
        names: Names of contenders; empty for all.

    Raises:
        ConfigurationError: If a name is unknown, given twice, or named and not installed.
    """
    for name in names:
        if name not in CONTENDERS:
            known = ", ".join(CONTENDERS)
            raise ConfigurationError("contenders", name, f"must be of {known}", suggest(name, CONTENDERS))
        if missing := CONTENDERS[name].missing():
            rule = f"needs {', '.join(missing)}, which is not installed"
            raise ConfigurationError("contenders", name, rule, INSTALL)
    if len(set(names)) < len(names):
        raise ConfigurationError("contenders", ",".join(names), "names one twice", "name each once")
    wanted = [CONTENDERS[name] for name in names or CONTENDERS]
    return [each for each in wanted if not each.missing()], [each for each in wanted if each.missing()]


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True
