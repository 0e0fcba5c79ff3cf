"""The state of a model: parameters and persistent buffers under the model's own names, and its configuration.

Wrappers such as DDP and torch.compile do not show in a checkpoint.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from checkpoint_core.errors import CheckpointError
from checkpoint_core.state.encoding import check_storable, tensor_identity
from checkpoint_core.storage.tensor_files import TensorSpec, spec_of
from checkpoint_core.storage.tensors import copy_values, is_sharded, same_bits

# These attribute names belong to the wrappers alone.
_HIDDEN = "_checkpoint_wrapped_module"
_WRAPPER_ATTRIBUTES = ("_orig_mod", _HIDDEN, "_fsdp_wrapped_module")
_logger = logging.getLogger(__name__)
_SHOWN = 10


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside all wrappers.

    Args:
        model: A model, perhaps wrapped by DDP, torch.compile, FSDP or activation checkpointing.

    Returns:
        The innermost module that is not a wrapper.
    """
    while (attribute := _wrapped_attribute(model)) is not None:
        model = model._modules[attribute]  # type: ignore[assignment]
    return model


class CanonicalNames:
    """Translates parameter and buffer names of a wrapped model to the names of the model itself.

    A part of a name is dropped only where the module at that place is a wrapper, so that a model's own
    submodule called ``module`` keeps its name.

    Args:
        model: The model, wrapped or not, with wrappers at any depth.
    """

    def __init__(self, model: nn.Module) -> None:
        self._transparent: set[str] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            attribute = _wrapped_attribute(module)
            if attribute is not None:
                # Checkpoint wrappers hide themselves from state_dict(), but not from named_modules().
                outer = [part for part in name.split(".") if part and part != _HIDDEN]
                self._transparent.add(f"{name}.{attribute}" if name else attribute)
                self._transparent.add(".".join([*outer, attribute]))

    def __call__(self, name: str) -> str:
        """The canonical form of one dotted name."""
        if not self._transparent:
            return name
        kept: list[str] = []
        place = ""
        for part in name.split("."):
            place = f"{place}.{part}" if place else part
            if place not in self._transparent:
                kept.append(part)
        return ".".join(kept)


def _wrapped_attribute(module: nn.Module) -> str | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    for attribute in _WRAPPER_ATTRIBUTES:
        if attribute in module._modules:
            return attribute
    return None


def config_bytes(model: nn.Module) -> bytes | None:
    """The content of ``config.json``.

    Args:
        model: A model whose ``config`` has ``to_dict()``, or is a dataclass or a dict.

    Returns:
        The JSON file's bytes, or None when the model has no such ``config``, or it is that of a model which
        ``peft`` has put adapters into.

    Raises:
        CheckpointError: The configuration holds something JSON cannot hold.
    """
    inner = unwrap(model)
    if getattr(inner, "peft_config", None):
        # Adapters change the names of weights. The loader of the class that this config names would find none
        # of them, and begin with random ones.
        return None
    config = getattr(inner, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        values = dict(to_dict())
        # Hugging Face's own loaders pick the class by this entry and fill it in only when they save.
        if "architectures" in values and not values["architectures"]:
            values["architectures"] = [type(inner).__name__]
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = dataclasses.asdict(config)
    elif isinstance(config, dict):
        values = config
    else:
        return None
    try:
        return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode("ascii")
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json cannot be written: the configuration of {type(inner).__name__} holds a value that "
            f"JSON has no form for ({error}). Give it a to_dict() that returns plain values."
        ) from error


@dataclass(frozen=True)
class WeightMatch:
    """Which stored tensors belong to which tensors of a model."""

    sources: Mapping[str, str]
    """The stored tensor for each tensor of the model; tied weights appear once."""
    repeated: Sequence[tuple[str, str]]
    """Tensors of the model that files hold a second time, with the other stored name."""
    unexpected: Sequence[str]
    """Stored tensors that the model does not have."""


class ModelState:
    """Weights of a model as a state component, stored in the Hugging Face layout.

    Args:
        model: The model. Wrappers (DDP, torch.compile, activation checkpointing) may be on it when saving,
            when loading, both, or neither. A sequence of modules stands for the parts of a model that this
            rank holds, such as pipeline stages; each uses the names of the whole model.
        tied: For parts of a model: aliases of weights that are stored under another name, which may live on
            another rank. ``{"lm_head.weight": "embed.weight"}`` stores the one and loads it into both.

    Raises:
        CheckpointError: Two parts hold different tensors under one name.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], *, tied: Mapping[str, str] | None = None
    ) -> None:
        self.parts: tuple[nn.Module, ...] = (model,) if isinstance(model, nn.Module) else tuple(model)
        self.tied: Mapping[str, str] = dict(tied or {})

    @property
    def unwrapped(self) -> nn.Module | None:
        """The first part inside its wrappers; None without parts."""
        return unwrap(self.parts[0]) if self.parts else None

    def state_dict(self) -> dict[str, object]:
        """All parameters and persistent buffers by canonical name, tied ones under each of their names.

        Returns:
            The live tensors, not copies.

        Raises:
            CheckpointError: A module keeps extra state, which the layout has no place for, or a tensor is
                of a kind that has no plain bytes.
        """
        return dict(self.tensors())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Copy tensors into the model's parameters and buffers, which keep their dtype and device.

        A tied weight may be there under any of its names. Nothing is changed unless every name and shape
        fits.

        Args:
            state: Tensors by canonical name.

        Raises:
            CheckpointError: Tensors are missing, unexpected or of another shape, of elements that share
                memory but would get different values, or of a dtype that cannot hold them, not even rounded;
                each is named.
        """
        stored = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        match = self.match({name: spec_of(value) for name, value in stored.items()}, {})
        check_nothing_left(match.unexpected)
        for name, other in match.repeated:
            check_tie(name, stored[match.sources[name]], other, stored[other])
        targets = self.tensors()
        for name, source in match.sources.items():
            if is_sharded(targets[name]):
                with torch.no_grad():
                    targets[name].copy_(stored[source])
            else:
                copy_values(targets[name].detach(), stored[source], name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The live tensors by canonical name, parameters as the objects the model holds."""
        found: dict[str, torch.Tensor] = {}
        for part in self.parts:
            canonical = CanonicalNames(part)
            for raw, value in part.state_dict(keep_vars=True).items():
                name = canonical(raw)
                _check_weight(name, value)
                if name in found and not _same(found[name], value):
                    raise CheckpointError(
                        f"two parts of the model hold different tensors named {name}. Give each part the "
                        "names of the whole model."
                    )
                found[name] = value
        return found

    def match(self, stored: Mapping[str, TensorSpec], aliases: Mapping[str, str]) -> WeightMatch:
        """Compare with what files hold.

        Args:
            stored: Dtype and shape of the stored tensors, by name.
            aliases: Name of a stored tensor, by further names it goes by.

        Returns:
            What to read for each tensor of the model.

        Raises:
            CheckpointError: Tensors are missing or of another shape; each is named.
        """
        known = {**{name: name for name in stored}, **aliases}
        targets = self.tensors()
        sources: dict[str, str] = {}
        repeated: list[tuple[str, str]] = []
        missing = []
        for names in _tie_groups(targets):
            found = list(
                dict.fromkeys(known[source] for name in names for source in self._sources(name, known))
            )
            if found:
                sources[names[0]] = found[0]
                repeated += [(names[0], other) for other in found[1:]]
            else:
                missing.append(names[0])
        wrong = [
            f"{name} ({list(stored[source].shape)} in the file, {list(targets[name].shape)} in the model)"
            for name, source in [*sources.items(), *repeated]
            if stored[source].shape != tuple(targets[name].shape)
        ]
        used = {*sources.values(), *(other for _, other in repeated)}
        unexpected = [name for name in stored if name not in used]
        if missing or wrong:
            _raise_mismatch({"missing": missing, "unexpected": unexpected, "wrong shape": wrong})
        _warn_about_casts(sources, stored, targets)
        return WeightMatch(sources, repeated, unexpected)

    def _sources(self, name: str, known: Mapping[str, str]) -> list[str]:
        # What is declared as tied was stored once; its own name is there only in files of other programs.
        candidates = [name, self.tied[name]] if name in self.tied else [name]
        return [candidate for candidate in candidates if candidate in known][:1]


def check_tie(name: str, value: torch.Tensor, other: str, other_value: torch.Tensor) -> None:
    """Refuse different stored values for one weight of the model.

    Args:
        name: The weight.
        value: Its stored value.
        other: Another stored name of the same weight.
        other_value: The value stored under that name.

    Raises:
        CheckpointError: The values differ.
    """
    same = other_value is value or (other_value.dtype == value.dtype and torch.equal(other_value, value))
    # Equal NaNs are one value here.
    if not same and (is_sharded(value) or not same_bits(value, other_value)):
        raise CheckpointError(
            f"the model ties {name} and {other}, but the file holds different values for them. Build the "
            "model without tied weights."
        )


def check_nothing_left(unexpected: Sequence[str]) -> None:
    """Refuse weights that no model took.

    Args:
        unexpected: Their names.

    Raises:
        CheckpointError: There are any.
    """
    _raise_mismatch({"unexpected": unexpected})


def _raise_mismatch(problems: Mapping[str, Sequence[str]]) -> None:
    found = [f"{title}: {_listing(names)}" for title, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"the weights do not fit the model: {'; '.join(found)}. Build the model with the configuration "
            "it was saved with."
        )


def _warn_about_casts(
    sources: Mapping[str, str], stored: Mapping[str, TensorSpec], targets: Mapping[str, torch.Tensor]
) -> None:
    cast = [name for name, source in sources.items() if stored[source].dtype != targets[name].dtype]
    if cast:
        _logger.warning(
            "casting %d tensors while loading weights, the first is %s: %s in the file, %s in the model",
            len(cast),
            cast[0],
            stored[sources[cast[0]]].dtype,
            targets[cast[0]].dtype,
        )


def _check_weight(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or name.split(".")[-1] == "_extra_state":
        owner = name.rpartition(".")[0] or "the model"
        raise CheckpointError(
            f"{owner} returns extra state ({name}), which safetensors weights have no place for. Declare it "
            "as a component of its own."
        )
    check_storable(value, f"weight {name}", sharded=True)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    identity = tensor_identity(left)
    return left is right or (identity is not None and identity == tensor_identity(right))


def _tie_groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names grouped by the memory they show, in the model's order; most groups have one name."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        identity = tensor_identity(tensor)
        groups.setdefault(name if identity is None else identity, []).append(name)
    return list(groups.values())


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
