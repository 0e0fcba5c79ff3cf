"""The built-in AdamW, and which parameters it does not decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import AdamW, Optimizer

from ..arguments import MinimalTrainingArguments
from ..distributed.clipping import own_part
from ..errors import ConfigurationError

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
"""Makes an optimizer of named parameters; with `optimizer_groups`, of torch's group dicts with named ones."""

NamedTensors = list[tuple[str, nn.Parameter]]
Group = dict[str, Any]

_FUSED_DEVICES = ("cpu", "cuda", "xpu")
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def decay_exemptions(model: nn.Module) -> dict[str, str]:
    """The parameters that weight decay leaves alone: biases, and whatever normalisation modules own.

    A module counts as normalisation if it is one of torch's, or if the name of its class ends in "Norm", as
    those of Hugging Face models do. Embeddings decay.

    Args:
        model: Any module.

    Returns:
        The reason, by parameter name as in `named_parameters()`.
    """
    reasons: dict[str, str] = {}
    for prefix, module in model.named_modules():
        kind = type(module).__name__
        is_norm = isinstance(module, _NORMS) or kind.endswith("Norm")
        for own, parameter in module.named_parameters(recurse=False):
            reason = f"of {kind}" if is_norm else _reason_alone(own, parameter)
            if reason:
                reasons[f"{prefix}.{own}" if prefix else own] = reason
    return reasons


def exemption(name: str, parameter: Tensor, known: Mapping[str, str]) -> str:
    """Why a parameter does not decay; empty if it does.

    Args:
        name: Its name.
        parameter: The parameter; fewer than two dimensions are reason enough.
        known: What `decay_exemptions` found; without it, names and dimensions tell alone.
    """
    return known.get(name) or _reason_alone(name.rpartition(".")[2], parameter)


def build_adamw(
    args: MinimalTrainingArguments,
    named_parameters: NamedParameters,
    *,
    exempt: Mapping[str, str] | None = None,
) -> AdamW:
    """AdamW from the arguments; biases and norm weights do not decay.

    Args:
        args: Learning rate, weight decay, betas and epsilon.
        named_parameters: Parameters by name; those that are frozen are left out.
        exempt: What `decay_exemptions` found in the model.

    Returns:
        torch's AdamW, fused where the device has a kernel for it.

    Raises:
        ConfigurationError: If no parameter is trainable.
    """
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    return adamw_of_groups(args, split_by_decay(trainable, args.weight_decay, exempt or {}))


def split_by_decay(members: NamedTensors, weight_decay: float, exempt: Mapping[str, str]) -> list[Group]:
    """Group dicts of those that decay and those that do not, without empty ones.

    Two even without decay, so that a run can be resumed with another one.
    """
    groups = [
        {"params": [(n, p) for n, p in members if not exemption(n, p, exempt)], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in members if exemption(n, p, exempt)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw_of_groups(args: MinimalTrainingArguments, groups: list[Group]) -> AdamW:
    """AdamW over group dicts with named parameters; options that a group does not give come from `args`.

    Raises:
        ConfigurationError: If there is no parameter.
    """
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    if not parameters:
        raise ConfigurationError("model", "frozen", "has no trainable parameter", "set requires_grad on some")
    has_kernel = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    # torch's kernel takes no DTensors beside plain tensors, which a layout of tensors alone leaves.
    has_kernel = has_kernel and len({own_part(p) is p for p in parameters}) == 1
    betas = (args.adam_beta1, args.adam_beta2)
    # None rather than False where there is no kernel: torch then takes `foreach` if the device has it.
    fused = True if has_kernel else None
    return AdamW(groups, args.learning_rate, betas, args.adam_epsilon, args.weight_decay, fused=fused)


def _reason_alone(own_name: str, parameter: Tensor) -> str:
    if own_name == "bias" or own_name.endswith("_bias"):
        return "bias"
    return "fewer than two dimensions" if parameter.ndim < 2 else ""
