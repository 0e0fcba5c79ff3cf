"""What FP8 and QAT exclude, and the versions of the library behind both."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..arguments import BaseTrainingArguments


def check_exclusive(args: BaseTrainingArguments) -> None:
    """Refuse FP8 together with QAT.

    Raises:
        ConfigurationError: If `fp8_recipe` and `qat_recipe` are both set.
    """
    if args.fp8_recipe is not None and args.qat_recipe is not None:
        raise ConfigurationError(
            "fp8_recipe",
            args.fp8_recipe,
            f"excludes qat_recipe={args.qat_recipe!r}: both replace the linear layers",
            "leave one of them out",
        )


def torchao_versions(setting: str, value: object) -> str:
    """The installed versions of torch and torchao, for reports and errors.

    Raises:
        ConfigurationError: If torchao is not installed; names `setting`.
    """
    try:
        return f"torch {torch.__version__}, torchao {version('torchao')}"
    except PackageNotFoundError as error:
        raise ConfigurationError(
            setting, value, "needs torchao, which is not installed", "pip install 'trainer-core[quant]'"
        ) from error


def refuse_converted(model: nn.Module, setting: str, value: object) -> None:
    """Refuse a model some of whose layers torchao has replaced or quantized before.

    Raises:
        ConfigurationError: Naming the first such layer.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        for thing in (module, weight):
            if thing is not None and type(thing).__module__.partition(".")[0] == "torchao":
                raise ConfigurationError(
                    setting,
                    value,
                    f"the model's {name!r} is a {type(thing).__name__} of torchao already",
                    "give the model before any conversion",
                )
