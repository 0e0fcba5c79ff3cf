"""A table that shows which parameter is optimized how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .adamw import NamedParameters, decay_exemptions, exemption
from .facade import OptimizerFacade
from .groups import DEFAULT, OptimizerGroups, ParameterGroups

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
