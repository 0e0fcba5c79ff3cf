"""Which linear layers of a model may be replaced."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..errors import ConfigurationError

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
        exclude: Patterns in the manner of `fnmatch`; each is held against the name of a layer and the names
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
                f"near: {', '.join(near)}" if near else "the model has no linear layer",
            )
