"""Tensor-parallel plans: which layer is divided in which way.

A plan is a table from names of modules to styles, such as {"model.layers.*.mlp.up_proj": "colwise"}. A `*`
stands for one part of a name, such as the number of a layer. Names and styles are those of Hugging Face's
`tp_plan`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

STYLES: Mapping[str, str] = {
    "colwise": "divides the outputs of a linear layer; each rank keeps its own",
    "colwise_gather_output": "divides the outputs of a linear layer, and gathers them, such as logits",
    "packed_colwise": "colwise for a layer that stacks others of equal size; each is divided by itself",
    "rowwise": "divides the inputs of a linear layer, which a colwise layer has divided; outputs are summed",
    "rowwise_split_input": "rowwise for an input that is whole on each rank",
    "embedding_rowwise": "divides an embedding by its vocabulary",
    "sequence": "whole on each rank; with sequence parallelism it works on each rank's part of the sequence",
    "replicate": "whole on each rank, and computes the same there",
    "replicated_with_grad_allreduce": "whole on each rank, and works on each rank's own heads",
}
"""Every style by its name, and what it does to a layer."""

_ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "sequence_parallel": "sequence",
}
# Styles of transformers that are about experts, or about parameters without a layer.
_EXPERTS = {
    *("moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts", "grouped_gemm", "all_reduce"),
    *("ep_router", "local_params", "packed_rowwise"),
}
_EXAMPLE = 'plan={"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}'


class PlanError(ValueError):
    """A plan, or a size, that a model cannot be divided with; says what it is, the rule, and what to do."""


def tensor_plan(model: nn.Module, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The plan to divide a model by: the given one, else the model's own.

    A model has a plan of its own as `tp_plan`. Models of transformers have one, with the embedding of the
    input divided by its vocabulary; those of older releases say it in two parts, `config.base_model_tp_plan`
    and `_tp_plan`. To change a part of it: `{**tensor_plan(model), "lm_head": "replicate"}`.

    Args:
        model: The model; its parameters may be on the meta device.
        given: Styles by name.

    Returns:
        Styles by name, each a key of `STYLES`.

    Raises:
        PlanError: The plan is missing or empty, or a style is unknown.
    """
    plan = _own_plan(model) if given is None else given
    if not isinstance(plan, Mapping) or not all(
        isinstance(part, str) for rule in plan.items() for part in rule
    ):
        raise PlanError(
            f"plan={type(plan).__name__} must be a table of styles by the names of modules. Such as "
            f"{_EXAMPLE}."
        )
    plan = _without_experts(model, plan, own=given is None)
    if not plan:
        whose = (
            f"The model {type(model).__name__} has no plan of its own"
            if given is None
            else "plan={} is empty"
        )
        raise PlanError(f"{whose}, so nothing would be divided. Give one, such as {_EXAMPLE}.")
    return {name: _style(name, style) for name, style in plan.items()}


def are_divided(module: nn.Module) -> bool:
    """Whether a module holds experts that `divide_experts` has divided, so that nothing else divides them."""
    return getattr(module, "experts_are_divided", False) is True


def _without_experts(model: nn.Module, plan: Mapping[str, str], *, own: bool) -> dict[str, str]:
    """The rules that are not about experts, or parameters of them, that are divided already.

    Of a model of transformers, those of its own plan that match nothing are left out as well: it has rules
    for layers without experts, too, and need not have such layers.
    """
    divided = [
        each
        for name, module in model.named_modules()
        if are_divided(module)
        for each in (name, *(f"{name}.{own}" for own in module._parameters))
    ]
    left = {rule: style for rule, style in plan.items() if not any(map(_pattern(rule).fullmatch, divided))}
    if own and divided and _is_of_transformers(model):
        names = [name for name, _ in model.named_modules()]
        return {rule: style for rule, style in left.items() if any(map(_pattern(rule).fullmatch, names))}
    return left


def _is_of_transformers(model: nn.Module) -> bool:
    return any(cls.__module__.startswith("transformers.models.") for cls in type(model).__mro__)


def _pattern(rule: str) -> re.Pattern[str]:
    return re.compile(re.escape(rule).replace(r"\*", "[^.]+"))


def _own_plan(model: nn.Module) -> Mapping[str, str]:
    plan = getattr(model, "tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return plan
    config = getattr(model, "config", None)
    of_base: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    if not hasattr(model, prefix):
        prefix = ""  # this is the base model itself
    of_base = {f"{prefix}.{name}" if prefix else name: style for name, style in of_base.items()}
    return {**of_base, **(getattr(model, "_tp_plan", None) or {})}


def _style(name: str, given: str) -> str:
    style = _ALIASES.get(given, given)
    if style in STYLES:
        return style
    if style in _EXPERTS or "expert" in style:
        raise PlanError(
            f"plan[{name!r}]={given!r} divides experts or single parameters, which tensor parallelism here "
            "does not. Divide experts first, by divide_experts or ep in a mesh, or use 'replicate' for this "
            "module, which keeps it whole on each rank."
        )
    close = difflib.get_close_matches(style, [*STYLES, *_ALIASES], 1, 0.6)
    hint = f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(STYLES)}."
    raise PlanError(f"plan[{name!r}]={given!r} is not a style. {hint}")


def match_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that a plan names.

    A name without `*` wins over one with it.

    Args:
        model: The model.
        plan: What `tensor_plan` returned.

    Returns:
        Styles by the full names of modules, in the order of the model.

    Raises:
        PlanError: A rule matches no module, or two rules with `*` give one module different styles.
    """
    found: dict[str, tuple[str, str]] = {}
    names = [name for name, _ in model.named_modules() if name]
    for rule in sorted(plan, key=lambda name: "*" not in name):
        matched = [name for name in names if _pattern(rule).fullmatch(name)]
        if not matched:
            raise PlanError(_unmatched(model, rule, names))
        for name in matched:
            other, style = found.get(name, ("", plan[rule]))
            if "*" in other and "*" in rule and style != plan[rule]:
                raise PlanError(
                    f"plan[{rule!r}]={plan[rule]!r} and plan[{other!r}]={style!r} both match the module "
                    f"{name}. Keep one of them."
                )
            found[name] = rule, plan[rule]
    return {name: found[name][1] for name in names if name in found}


def _unmatched(model: nn.Module, rule: str, names: list[str]) -> str:
    parameters = {collapsed(name): name for name, _ in model.named_parameters()}
    if collapsed(rule) in parameters:
        return (
            f"plan names the parameter {rule!r}, and only modules can be divided. Name the module that it "
            "belongs to, or leave it out."
        )
    known = list(dict.fromkeys(map(collapsed, names)))
    close = difflib.get_close_matches(rule, known, 1, 0.6)
    hint = (
        f"Did you mean {close[0]!r}?"
        if close
        else "Leave it out, or see model.named_modules() for the names."
    )
    return f"plan names {rule!r}, and the model {type(model).__name__} has no module of that name. {hint}"


def collapsed(name: str) -> str:
    """A name with `*` in place of the numbers of layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def ancestors(name: str) -> Iterator[str]:
    """Names of the modules around a module, from the inside out; the model itself (an empty name) is last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def module_at(model: nn.Module, name: str) -> Any:
    """The module of a name, the model itself for an empty one."""
    return model.get_submodule(name)


def as_kind(module: nn.Module, kind: type[M], name: str) -> M:
    """A module, called so in the model, as what its style is for.

    Raises:
        TypeError: It is something else, which whoever examined the plan has refused.
    """
    if not isinstance(module, kind):
        raise TypeError(
            f"The module {name} is of the class {type(module).__name__}, and its style in the plan divides "
            f"only {kind.__name__}. Give it another style there, such as 'replicate'."
        )
    return module
