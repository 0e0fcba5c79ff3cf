"""Which linear layers of a model may be replaced, what excludes that, and a report of what was replaced."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
            f"cannot be combined with qat_recipe={args.qat_recipe!r}, because both replace the linear layers",
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
            setting,
            value,
            "needs torchao, which is not installed",
            "install it with `pip install 'trainer-core[quant]'`",
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
                    f"cannot convert a model that was converted before: {name!r} is a "
                    f"{type(thing).__name__} of torchao already",
                    "give the model before any conversion",
                )


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """Outcome of replacing linear layers; `str()` gives the text for the log.

    Attributes:
        what: What the layers became.
        converted: Names of the replaced layers.
        left_alone: For each reason, the names of the layers that stay.
        converted_weights: Elements of the weights of the replaced layers.
        all_weights: Elements of the weights of all linear layers; a shared one counts for each layer.
        fp8_share: Share of the FLOPs of all products of linear layers, forward and backward, that run in FP8;
            0 without FP8 hardware. Attention is not among them. For the peak of mixed formats take
            `1 / (fp8_share / peak_fp8 + (1 - fp8_share) / peak_other)`.
        notes: What else to know, a line each.
    """

    what: str
    converted: tuple[str, ...]
    left_alone: Mapping[str, tuple[str, ...]]
    converted_weights: int
    all_weights: int
    fp8_share: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Number of linear layers."""
        return len(self.converted) + sum(map(len, self.left_alone.values()))

    @property
    def weight_share(self) -> float:
        """Share of the weight elements of linear layers that were converted."""
        return self.converted_weights / self.all_weights if self.all_weights else 0.0

    def __str__(self) -> str:
        head = f"{self.what}: {len(self.converted)} of {self.total} linear layers"
        lines = [f"{head}, {self.weight_share:.1%} of their weights"]
        lines += [f"  converted: {', '.join(grouped(self.converted))}"] if self.converted else []
        lines += [
            f"  left alone, {why}: {', '.join(grouped(names))}" for why, names in self.left_alone.items()
        ]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def grouped(names: Iterable[str]) -> list[str]:
    """Names that differ in their numbers only, as one: `layers.*.up (12 times)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [f"{p} ({len(of)} times)" if len(of) > 1 else of[0] for p, of in groups.items()]


LayerRule = Callable[[str, nn.Linear], str | None]
"""Why a layer of this name must be left alone; None if it may be replaced."""


@dataclass(frozen=True)
class LayerChoice:
    """Layers to replace, and reasons to leave the others alone.

    Attributes:
        chosen: Layers by name; one that has several names is under the first.
        left_alone: For each reason, names.
        aliases: Further names of chosen layers, and the first name of each.
        weights: Elements of all linear weights.
    """

    chosen: Mapping[str, nn.Linear]
    left_alone: Mapping[str, tuple[str, ...]]
    aliases: Mapping[str, str]
    weights: int

    @property
    def chosen_weights(self) -> int:
        """Elements of the chosen weights."""
        return sum(layer.weight.numel() for layer in self.chosen.values())

    def replaces(self, module: nn.Module, name: str) -> bool:
        """Whether torchao shall replace this module; in the form of torchao's filters."""
        return any(module is layer for layer in self.chosen.values())

    def finish(self, model: nn.Module) -> None:
        """Give every new layer the very parameters, mode and names of the layer that it replaces."""
        for name, old in self.chosen.items():
            new = model.get_submodule(name)
            # torchao makes new parameters for a model without storage.
            new.weight, new.bias = old.weight, old.bias
            new.train(old.training)
        for alias, name in self.aliases.items():
            parent, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(parent), attribute, model.get_submodule(name))


def choose_layers(model: nn.Module, rule: LayerRule, exclude: Sequence[str] = ()) -> LayerChoice:
    """Sort the linear layers of a model into those to replace and those to leave alone.

    The output layer, layers with hooks, and layers of classes derived from `nn.Linear` are left alone.

    Args:
        model: The model.
        rule: What else keeps a layer from being replaced.
        exclude: Patterns in the manner of `fnmatch`; each is compared with the name of a layer and the names
            of the modules that hold it.

    Raises:
        ConfigurationError: If a pattern matches no linear layer.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    linears: dict[str, nn.Linear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Linear):
            continue
        if id(module) in first:
            aliases[name] = first[id(module)]
        else:
            first[id(module)] = name
            linears[name] = module
    _check_patterns(exclude, [*linears, *aliases])
    head = output_layer(model)
    chosen: dict[str, nn.Linear] = {}
    left: dict[str, list[str]] = {}
    for name, layer in linears.items():
        names = [name, *(alias for alias, of in aliases.items() if of == name)]
        reason = _general_reason(names, layer, head, exclude) or rule(name, layer)
        if reason is None:
            chosen[name] = layer
        else:
            left.setdefault(reason, []).append(name)
    return LayerChoice(
        chosen,
        {reason: tuple(names) for reason, names in left.items()},
        {alias: name for alias, name in aliases.items() if name in chosen},
        sum(layer.weight.numel() for layer in linears.values()),
    )


def output_layer(model: nn.Module) -> nn.Module | None:
    """What the model's `get_output_embeddings()` gives; None if it has no such method."""
    get = getattr(model, "get_output_embeddings", None)
    found = get() if callable(get) else None
    return found if isinstance(found, nn.Module) else None


def _general_reason(
    names: Sequence[str], layer: nn.Linear, head: nn.Module | None, exclude: Sequence[str]
) -> str | None:
    if layer is head:
        return "the output layer"
    for pattern in exclude:
        if any(_matches(pattern, name) for name in names):
            return f"excluded by {pattern!r}"
    if "" in names:
        return "the model itself, which cannot be replaced from within"
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__}, whose own forward would be lost"
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks):
        return "has hooks, which would be lost"
    return None


def _matches(pattern: str, name: str) -> bool:
    """Whether the pattern is that of the layer or of a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _check_patterns(exclude: Sequence[str], names: Sequence[str]) -> None:
    for pattern in exclude:
        if not any(_matches(pattern, name) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names[:3])
            raise ConfigurationError(
                "fp8_exclude",
                pattern,
                "matches no linear layer",
                f"use one of the nearest names: {', '.join(near)}"
                if near
                else "leave it out, because the model has no linear layer",
            )
