"""Parameter groups by name pattern, the optimizers made of them, and a table that shows them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import Any, TypeGuard, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ..arguments import MinimalTrainingArguments, rules
from ..errors import ConfigurationError
from .muon import build_muon, matrices_for_adamw
from .optimizers import (
    Group,
    Multiopt,
    NamedParameters,
    NamedTensors,
    OptimizerFacade,
    OptimizerFactory,
    adamw_of_groups,
    decay_exemptions,
    exemption,
    schedule_free_of_groups,
    split_by_decay,
)

REGEX_PREFIX = "re:"


def assign(patterns: Sequence[str], trainable: Mapping[str, bool]) -> dict[str, str | None]:
    """Give every trainable parameter to the first pattern that matches its whole name.

    Args:
        patterns: Shell patterns (`*`, `?`, `[...]`; `*` crosses dots), or regular expressions after `re:`.
        trainable: Names of all parameters, and whether each is trainable.

    Returns:
        The pattern of each trainable parameter; None for those that none matches.

    Raises:
        ConfigurationError: For a pattern that is not a regular expression, or that gets no parameter.
    """
    compiled = {pattern: compile_pattern(pattern) for pattern in patterns}
    owner: dict[str, str | None] = {}
    for name in (name for name, is_trainable in trainable.items() if is_trainable):
        owner[name] = next((p for p, matcher in compiled.items() if matcher.fullmatch(name)), None)
    for pattern, matcher in compiled.items():
        if pattern not in owner.values():
            matched = [name for name in trainable if matcher.fullmatch(name)]
            raise _gets_nothing(pattern, matched, owner, trainable)
    return owner


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern; its `fullmatch` decides.

    Raises:
        ConfigurationError: If what follows `re:` is not a regular expression.
    """
    if not pattern.startswith(REGEX_PREFIX):
        return re.compile(translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGEX_PREFIX))
    except re.error as error:
        raise ConfigurationError(
            "optimizer_groups", pattern, f"is not a regular expression ({error})", "correct it"
        ) from error


def _gets_nothing(
    pattern: str, matched: Sequence[str], owner: Mapping[str, str | None], trainable: Mapping[str, bool]
) -> ConfigurationError:
    taken = [name for name in matched if trainable[name]]
    if taken:
        earlier = owner[taken[0]]
        return ConfigurationError(
            "optimizer_groups",
            pattern,
            f"comes after {earlier!r}, which takes all that it matches, such as {taken[0]}",
            "write the narrower pattern first",
        )
    if matched:
        return ConfigurationError(
            "optimizer_groups",
            pattern,
            f"matches only frozen parameters, such as {matched[0]}",
            "set requires_grad on them, or take the pattern out",
        )
    return ConfigurationError(
        "optimizer_groups",
        pattern,
        "matches no parameter by its whole name",
        f"use one of the nearest names: {', '.join(_nearest(pattern, trainable))}",
    )


def _nearest(pattern: str, names: Mapping[str, bool]) -> list[str]:
    literal = re.sub(r"\\(.)", r"\1", pattern.removeprefix(REGEX_PREFIX)).strip("*^$")
    near = difflib.get_close_matches(literal, list(names), n=3, cutoff=0.3)
    return near or list(names)[:3]


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
    factory: _GroupFactory | None


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
                    "must map each pattern of parameter names to a mapping of options",
                    "write {'*.bias': {'weight_decay': 0.0}}, for example",
                )
            factory = options.get("factory")
            if factory is not None and not _is_factory(factory):
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
        for_adamw: Mapping[str, str] | None = None,
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
            for_adamw: Matrices that a built-in Muon leaves to AdamW.

        Returns:
            One optimizer with groups; a `Multiopt` if there are several factories, or the built-in is Muon.

        Raises:
            ConfigurationError: For a pattern without parameters, or options that its optimizer lacks.
        """
        named = list(named_parameters)
        by_factory: dict[_GroupFactory | None, list[_Part]] = {}
        # Here it is called with groups: torch's optimizers take these and named parameters alike.
        default = cast("_GroupFactory | None", factory)
        for part in self._parts(named, default, among):
            by_factory.setdefault(part.factory, []).append(part)
        made: list[Optimizer] = []
        for own, parts in by_factory.items():
            if own is None and args.optim == "muon":
                made += _muon_and_adamw(args, parts, exempt or {}, for_adamw or {})
            else:
                made.append(self._make(args, own, parts, exempt or {}))
        if not made:
            return adamw_of_groups(args, [])  # says that nothing is trainable
        return made[0] if len(made) == 1 else Multiopt(made)

    def _parts(
        self, named: NamedTensors, default: _GroupFactory | None, among: Mapping[str, bool] | None
    ) -> list[_Part]:
        """One part per pattern that has parameters, the default first."""
        owner = self._owners(among or {name: parameter.requires_grad for name, parameter in named})
        parts = []
        for pattern in (DEFAULT, *self.groups):
            members = [(name, parameter) for name, parameter in named if owner.get(name) == pattern]
            options = dict(self.groups.get(pattern, {}))
            own = options.pop("factory", None)
            if members:
                parts.append(_Part(pattern, members, options, own if _is_factory(own) else default))
        return parts

    def _make(
        self,
        args: MinimalTrainingArguments,
        factory: _GroupFactory | None,
        parts: list[_Part],
        exempt: Mapping[str, str],
    ) -> Optimizer:
        if factory is None:
            groups = [group for part in parts for group in _with_decay(args, part, exempt)]
            schedule_free = args.optim == "schedule_free_adamw"
            make = schedule_free_of_groups if schedule_free else adamw_of_groups
            optimizer: Optimizer = make(args, groups)
        else:
            own_groups: list[Group] = [{"params": part.members, **part.options} for part in parts]
            optimizer = factory(own_groups)
        for part in parts:
            _check_options(part, optimizer)
        return optimizer


def _is_factory(option: object) -> TypeGuard[_GroupFactory]:
    return callable(option)


def build_optimizer(
    args: MinimalTrainingArguments,
    model: nn.Module,
    *,
    named_parameters: NamedParameters | None = None,
    groups: OptimizerGroups | None = None,
    factory: OptimizerFactory | None = None,
    among: Mapping[str, bool] | None = None,
    whole_model: nn.Module | None = None,
) -> Optimizer:
    """The optimizer of a run, from what the trainer was given.

    Args:
        args: Options of the built-in AdamW.
        model: Tells biases and norms from the rest.
        named_parameters: What to optimize; all parameters of the model otherwise.
        groups: `optimizer_groups`, if given.
        factory: `optimizer_factory`, if given; without groups it is called with the named parameters.
        among: Names of the whole model, and whether they are trained, where this process has a part of it.
        whole_model: The model with all its parameters, where this process has a part of them.

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
        uses_muon = args.optim == "muon" and factory is None
        optimizer = ParameterGroups(groups or {}).build(
            args,
            named,
            factory=factory,
            exempt=decay_exemptions(model),
            among=among,
            for_adamw=matrices_for_adamw(whole_model or model) if uses_muon else None,
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            "optimizer_factory",
            type(optimizer).__name__,
            "is not an optimizer, which the factory must return",
            "return one, such as torch.optim.AdamW(groups)",
        )
    return optimizer


def _muon_and_adamw(
    args: MinimalTrainingArguments,
    parts: list[_Part],
    exempt: Mapping[str, str],
    for_adamw: Mapping[str, str],
) -> list[Optimizer]:
    """AdamW, whose rate is logged, and Muon; each is there on every rank, even if it has nothing to step."""
    left, taken = [], []
    for part in parts:
        hidden = {
            name
            for name, p in part.members
            if p.ndim == 2 and not exemption(name, p, exempt) and name not in for_adamw
        }
        if rest := [(name, p) for name, p in part.members if name not in hidden]:
            left.append(replace(part, members=rest))
        if hidden:
            taken.append(replace(part, members=[(name, p) for name, p in part.members if name in hidden]))
    nothing: list[Group] = [{"params": []}]
    groups = [group for part in left for group in _with_decay(args, part, exempt)]
    adamw = adamw_of_groups(args, groups or nothing, may_be_empty=True)
    muon = build_muon(args, [{"params": part.members, **part.options} for part in taken] or nothing)
    for optimizer, some in ((adamw, left), (muon, taken)):
        for part in some:
            _check_options(part, optimizer)
    return [adamw, muon]


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
                f"is not an option of {type(optimizer).__name__}",
                f"did you mean {near[0]!r}?"
                if near
                else f"use one of {', '.join(sorted(optimizer.defaults))}",
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
            raise ConfigurationError(setting, value, "must be two numbers", "write (0.9, 0.999), for example")
        for beta in value:
            rules.within(setting, beta, 0.0, 1.0 - 1e-9)


_HIDDEN = ("params", "param_names", "initial_lr", "lr", "weight_decay")


def optimizer_table(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    named_parameters: NamedParameters | None = None,
    groups: OptimizerGroups | None = None,
) -> str:
    """One line per parameter: its pattern, its optimizer, and the options it really has.

    Options other than learning rate and weight decay are shown where groups of one optimizer differ in them.
    The last column says why a parameter does not decay, or that it is frozen.

    Args:
        optimizer: As it is; nothing is taken from arguments.
        model: Tells biases and norms from the rest.
        named_parameters: What to list; all parameters of the model otherwise.
        groups: `optimizer_groups`, if given.

    Returns:
        Lines of aligned columns, under a head.
    """
    named = list(model.named_parameters() if named_parameters is None else named_parameters)
    patterns = ParameterGroups(groups or {}).assign(named)
    places = {id(p): (kind, group) for kind, group in _groups(optimizer) for p in group["params"]}
    differing = _differing(list(_groups(optimizer)))
    exempt = decay_exemptions(model)
    rows = [["parameter", "shape", "group", "optimizer", "lr", "weight decay", *differing, "note"]]
    for name, parameter in named:
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        if id(parameter) not in places:
            note = "not in the optimizer" if parameter.requires_grad else "frozen"
            rows.append([name, shape, *["-"] * (4 + len(differing)), note])
            continue
        kind, group = places[id(parameter)]
        decay = group.get("weight_decay")
        options = [_text(group.get(option)) for option in ("lr", "weight_decay", *differing)]
        note = "" if decay else exemption(name, parameter, exempt)
        rows.append([name, shape, patterns.get(name, DEFAULT), kind, *options, note])
    return _aligned(rows)


def _groups(optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    members = optimizer.optimizers if isinstance(optimizer, OptimizerFacade) else (optimizer,)
    for member in members:
        for group in member.param_groups:
            yield type(member).__name__, group


def _differing(groups: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Options that some groups have otherwise than other groups of the same kind of optimizer."""
    values: dict[tuple[str, str], set[str]] = {}
    for kind, group in groups:
        for name in group:
            values.setdefault((name, kind), set()).add(_text(group[name]) if name not in _HIDDEN else "")
    return list(dict.fromkeys(name for (name, _), seen in values.items() if len(seen) > 1))


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
