"""Parameter groups by name pattern, and the optimizer or optimizers made of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from .. import rules
from ..arguments import MinimalTrainingArguments
from ..errors import ConfigurationError
from .adamw import (
    Group,
    NamedParameters,
    NamedTensors,
    OptimizerFactory,
    adamw_of_groups,
    decay_exemptions,
    split_by_decay,
)
from .multi import Multiopt
from .patterns import assign

OptimizerGroups = Mapping[str, Mapping[str, object]]
"""Options (`lr`, `weight_decay`, ... and `factory`) by pattern of parameter names, in order."""

DEFAULT = "(default)"
_LIMITS = {"lr": (0.0, 1e3), "weight_decay": (0.0, 1e3), "eps": (0.0, 1.0)}
_GroupFactory = Callable[[list[Group]], Optimizer]


@dataclass(frozen=True)
class _Part:
    """The parameters of one pattern."""

    pattern: str
    members: NamedTensors
    options: dict[str, object]
    factory: OptimizerFactory | None


class ParameterGroups:
    """Says which parameters share which optimizer options.

    Patterns are tried in their order, and the first that matches the whole name takes the parameter: shell
    patterns such as ``*.embed.*``, or regular expressions after ``re:``. Parameters that none matches make
    the default group. Frozen parameters belong to no group. An option `factory` gives the parameters of a
    pattern an optimizer of their own.

    Args:
        groups: Options by pattern.

    Raises:
        ConfigurationError: If `groups` is no such mapping.

    Example:
        ``ParameterGroups({"*.bias": {"lr": 1e-4}, "re:layers\\\\.[0-3]\\\\..*": {"lr": 1e-5}})``
    """

    def __init__(self, groups: OptimizerGroups) -> None:
        for pattern, options in groups.items():
            if not isinstance(pattern, str) or not isinstance(options, Mapping):
                raise ConfigurationError(
                    "optimizer_groups",
                    {pattern: options},
                    "must give a mapping of options for each pattern of parameter names",
                    "write {'*.bias': {'weight_decay': 0.0}}, say",
                )
            factory = options.get("factory")
            if factory is not None and not callable(factory):
                raise ConfigurationError(
                    f"optimizer_groups[{pattern!r}].factory",
                    factory,
                    "must be callable with groups of parameters",
                    "give a function that returns an optimizer",
                )
        self.groups = {pattern: dict(options) for pattern, options in groups.items()}

    def assign(self, named_parameters: NamedParameters) -> dict[str, str]:
        """The pattern of each trainable parameter, or `(default)`.

        Raises:
            ConfigurationError: For a pattern that gets no parameter, with the nearest names.
        """
        return self._owners({name: parameter.requires_grad for name, parameter in named_parameters})

    def _owners(self, trainable: Mapping[str, bool]) -> dict[str, str]:
        return {name: p or DEFAULT for name, p in assign(list(self.groups), trainable).items()}

    def build(
        self,
        args: MinimalTrainingArguments,
        named_parameters: NamedParameters,
        *,
        factory: OptimizerFactory | None = None,
        exempt: Mapping[str, str] | None = None,
        among: Mapping[str, bool] | None = None,
    ) -> Optimizer:
        """Make the optimizer.

        Args:
            args: Options of the built-in AdamW.
            named_parameters: All parameters by name.
            factory: Makes the optimizer of every group without one of its own; the built-in AdamW otherwise.
                Called with torch's group dicts, whose `params` are named parameters.
            exempt: Parameters that the built-in AdamW does not decay, unless a pattern sets `weight_decay`.
            among: Names that patterns have to match, and whether they are trained, if other processes have
                some of them; a pattern may match none of those here then.

        Returns:
            One optimizer with groups; a `Multiopt` if there are several factories.

        Raises:
            ConfigurationError: For a pattern without parameters, or options that its optimizer lacks.
        """
        named = list(named_parameters)
        by_factory: dict[OptimizerFactory | None, list[_Part]] = {}
        for part in self._parts(named, factory, among):
            by_factory.setdefault(part.factory, []).append(part)
        made = [self._make(args, own, parts, exempt or {}) for own, parts in by_factory.items()]
        if not made:
            return adamw_of_groups(args, [])  # says that nothing is trainable
        return made[0] if len(made) == 1 else Multiopt(made)

    def _parts(
        self, named: NamedTensors, default: OptimizerFactory | None, among: Mapping[str, bool] | None
    ) -> list[_Part]:
        """One part per pattern that has parameters, the default first."""
        owner = self._owners(among or {name: parameter.requires_grad for name, parameter in named})
        parts = []
        for pattern in (DEFAULT, *self.groups):
            members = [(name, parameter) for name, parameter in named if owner.get(name) == pattern]
            options = dict(self.groups.get(pattern, {}))
            own = cast(OptimizerFactory | None, options.pop("factory", None))
            if members:
                parts.append(_Part(pattern, members, options, own or default))
        return parts

    def _make(
        self,
        args: MinimalTrainingArguments,
        factory: OptimizerFactory | None,
        parts: list[_Part],
        exempt: Mapping[str, str],
    ) -> Optimizer:
        if factory is None:
            groups = [group for part in parts for group in _with_decay(args, part, exempt)]
            optimizer: Optimizer = adamw_of_groups(args, groups)
        else:
            own_groups: list[Group] = [{"params": part.members, **part.options} for part in parts]
            optimizer = cast(_GroupFactory, factory)(own_groups)
        for part in parts:
            _check_options(part, optimizer)
        return optimizer


def build_optimizer(
    args: MinimalTrainingArguments,
    model: nn.Module,
    *,
    named_parameters: NamedParameters | None = None,
    groups: OptimizerGroups | None = None,
    factory: OptimizerFactory | None = None,
    among: Mapping[str, bool] | None = None,
) -> Optimizer:
    """The optimizer of a run, from what the trainer was given.

    Args:
        args: Options of the built-in AdamW.
        model: Tells biases and norms from the rest.
        named_parameters: What to optimize; all parameters of the model otherwise.
        groups: `optimizer_groups`, if given.
        factory: `optimizer_factory`, if given; without groups it is called with the named parameters.
        among: Names of the whole model, and whether they are trained, where this process has a part of it.

    Returns:
        The optimizer, ready for a schedule.

    Raises:
        ConfigurationError: If nothing is trainable, groups and parameters do not fit, or a factory returns
            something else.
    """
    named = list(model.named_parameters() if named_parameters is None else named_parameters)
    if groups is None and factory is not None:
        optimizer = factory(named)
    else:
        exempt = decay_exemptions(model)
        optimizer = ParameterGroups(groups or {}).build(
            args, named, factory=factory, exempt=exempt, among=among
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            "optimizer_factory", type(optimizer).__name__, "was returned, which is no optimizer", "return one"
        )
    return optimizer


def _with_decay(args: MinimalTrainingArguments, part: _Part, exempt: Mapping[str, str]) -> list[Group]:
    """Groups of the built-in AdamW; a pattern that sets `weight_decay` means all its parameters."""
    if "weight_decay" in part.options:
        return [{"params": part.members, **part.options}]
    return [{**group, **part.options} for group in split_by_decay(part.members, args.weight_decay, exempt)]


def _check_options(part: _Part, optimizer: Optimizer) -> None:
    """Refuse options that the optimizer does not know; torch would keep them without a word."""
    for option, value in part.options.items():
        if option not in optimizer.defaults:
            near = difflib.get_close_matches(option, optimizer.defaults, n=1)
            raise ConfigurationError(
                f"optimizer_groups[{part.pattern!r}].{option}",
                value,
                f"is no option of {type(optimizer).__name__}",
                f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(optimizer.defaults))}",
            )
        setting = f"optimizer_groups[{part.pattern!r}].{option}"
        _check_value(setting, option, value, optimizer.defaults[option])


def _check_value(setting: str, option: str, value: object, default: object) -> None:
    """Hold options that mean the same as arguments against the same limits.

    An optimizer whose default has another form, as the two `eps` of Adafactor, means something else.
    """
    if option in _LIMITS and isinstance(default, int | float) and not isinstance(value, Tensor):
        rules.within(setting, value, *_LIMITS[option])
    if option == "betas" and isinstance(default, tuple) and len(default) == 2:
        if not isinstance(value, Sequence) or len(value) != 2:
            raise ConfigurationError(setting, value, "must be two numbers", "write (0.9, 0.999), say")
        for beta in value:
            rules.within(setting, beta, 0.0, 1.0 - 1e-9)
