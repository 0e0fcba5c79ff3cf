"""Which operators keep their results when everything else of a block is recomputed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import ConfigurationError

SETTING = "activation_checkpointing_operators"

DEFAULT_OPERATORS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional.all_reduce",
    "_c10d_functional.all_gather_into_tensor",
    "_c10d_functional.reduce_scatter_tensor",
    "_c10d_functional.all_to_all_single",
    "_c10d_functional.wait_tensor",
)
"""Matrix products, attention and collectives: what is slow to do again. Those that the installed torch does
not have are left out."""


def operators(names: tuple[str, ...] | None) -> frozenset[OpOverload]:
    """Return the operators that keep their results, with all their overloads.

    Args:
        names: Names such as `mm`, `aten.mm`, `aten::mm` or `aten.mm.default`; None: `DEFAULT_OPERATORS`.

    Raises:
        ConfigurationError: If torch has no such operator, or if it is made of others, so that its result is
            never seen.
    """
    if names is None:
        return frozenset(_overloads(_packet(name) for name in DEFAULT_OPERATORS))
    return frozenset(_overloads(_named(name) for name in names))


def _named(name: str) -> OpOverloadPacket | OpOverload:
    found = _packet(name)
    if found is None:
        raise ConfigurationError(SETTING, name, "torch has no operator of that name", _suggestion(name))
    for overload in _overloads([found]):
        if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            raise ConfigurationError(
                SETTING,
                name,
                "is carried out as other operators, so there is no result of its own to keep",
                "name those, such as aten.mm, aten.addmm and aten.bmm for a matrix product",
            )
        break
    return found


def _packet(name: str) -> OpOverloadPacket | OpOverload | None:
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    if len(parts) == 1:
        parts.insert(0, "aten")
    found: object = torch.ops
    for part in parts:
        if not part.isidentifier():
            return None
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverloadPacket | OpOverload) else None


def _overloads(found: Iterable[OpOverloadPacket | OpOverload | None]) -> Iterable[OpOverload]:
    for operator in found:
        if isinstance(operator, OpOverload):
            yield operator
        elif operator is not None:
            for overload in operator.overloads():  # type: ignore[no-untyped-call]
                yield getattr(operator, overload)


def _suggestion(name: str) -> str:
    known = {full.split(".")[0].replace("::", ".") for full in torch._C._dispatch_get_all_op_names()}
    wanted = name if "." in name else f"aten.{name}"
    near = difflib.get_close_matches(wanted.replace("::", "."), sorted(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else "names look like aten.mm or aten.bmm"
