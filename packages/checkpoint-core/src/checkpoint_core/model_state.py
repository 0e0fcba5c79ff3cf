"""The state of a model and of its optimizer, under the model's own names.

Wrappers such as DDP and torch.compile do not show in a checkpoint.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpoint_core.encoding import (
    TAG,
    Path,
    check_storable,
    copy_values,
    is_sharded,
    join_path,
    same_bits,
    tensor_identity,
)
from checkpoint_core.errors import CheckpointError
from checkpoint_core.tensor_files import TensorSpec, spec_of
from checkpoint_core.wrappers import CanonicalNames, unwrap

_logger = logging.getLogger(__name__)
_SHOWN = 10


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
        self.check_nothing_left(match.unexpected)
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
            state = part.state_dict(keep_vars=True)
            held = {id(value) for value in (*part.parameters(), *part.buffers())}
            again: Mapping[str, torch.Tensor] = {}
            for raw, value in state.items():
                name = canonical(raw)
                _check_weight(name, value)
                if id(value) not in held:
                    again = again or part.state_dict(keep_vars=True)
                    _check_live(name, value, again.get(raw))
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

    def check_nothing_left(self, unexpected: Sequence[str]) -> None:
        """Refuse weights that no model took.

        Raises:
            CheckpointError: There are any; names them.
        """
        _raise_mismatch({"unexpected": unexpected})

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


def _check_live(name: str, value: torch.Tensor, again: torch.Tensor | None) -> None:
    """Refuse a copy that ``state_dict()`` makes: what is loaded into it does not reach the model.

    Args:
        name: The weight.
        value: What was returned for it, and is not a parameter or buffer.
        again: What another call returned: the same memory, if it is a view or an attribute of the model.
    """
    if again is not None and is_sharded(value) and is_sharded(again):
        value, again = value.to_local(), again.to_local()
    if again is None or not (_same(value, again) or value.numel() == 0):
        raise CheckpointError(
            f"weight {name} is a copy that state_dict() of the model, or a hook of it, makes at each call, "
            "so what is loaded into it would not reach the model. Return the model's own tensors there, and "
            "convert weights where they are exported."
        )


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


# Positions and a copy of the names, which PyTorch keeps in its parameter groups; names replace both.
_NOT_HYPERPARAMETERS = ("params", "param_names")
_SECTIONS = ("parameters", "state")
# How a step is computed, not what: the live optimizer was built for it, and its step functions rely on it.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay")


class OptimizerState:
    """An optimizer as a state component.

    ``state_dict()`` holds ``parameters`` (shape and hyperparameters of every parameter, by name) and
    ``state`` (by parameter name, then by state name, such as ``exp_avg``). Nothing in it depends on the order
    or the grouping of the parameters, or on how many ranks hold them.

    Args:
        optimizer: Any optimizer with PyTorch's ``state_dict`` protocol.
        model: The model that owns the optimizer's parameters, wrapped or not; or the parts of it that this
            rank holds.
        tied: As in :class:`ModelState`: weights that are copies of another one, by name. Their optimizer
            state is a copy too, stored once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | Sequence[nn.Module],
        *,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.parts: tuple[nn.Module, ...] = (model,) if isinstance(model, nn.Module) else tuple(model)
        self.tied: Mapping[str, str] = dict(tied or {})

    @staticmethod
    def tensor_name(path: Path) -> str:
        """The name of a state tensor in the file: ``<parameter name>.<state name>``."""
        return join_path(path[1:] if path[0] == "state" else path)

    def state_dict(self) -> dict[str, object]:
        """The state by parameter name.

        Returns:
            The live tensors, not copies.

        Raises:
            CheckpointError: The optimizer has a parameter that is not the model's, or its state an entry that
                is of no parameter.
        """
        names = self.names()
        packed = self.optimizer.state_dict()
        if further := sorted(str(entry) for entry in packed if entry not in ("state", "param_groups")):
            raise CheckpointError(
                f"state_dict() of the {type(self.optimizer).__name__} has the entry {further[0]!r} beside "
                "state and param_groups. It belongs to no parameter, and would be lost. Give OptimizerState "
                "the optimizer that this one is around, and save the entry as a component of its own."
            )
        parameters: dict[str, object] = {}
        for name, (parameter, group) in zip(names, self._parameters(), strict=True):
            values = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            parameters[name] = {"shape": list(parameter.shape), "hyperparameters": values}
        state = {names[index]: values for index, values in packed["state"].items()}
        return {"parameters": parameters, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore hyperparameters and per-parameter state by name.

        The optimizer may hold its parameters in another order and in other groups than when it was saved, as
        long as the parameters of each group were saved with the same hyperparameters. Options that choose an
        implementation, such as ``fused``, stay those of the live optimizer. Tensors keep the dtype they were
        saved with.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            CheckpointError: Parameters are missing, unexpected, of another shape or grouped differently.
        """
        names = self.names()
        self.check_nothing_left(self.match(state))
        position = {name: index for index, name in enumerate(names)}
        groups = []
        begin = 0
        grouped = zip(self.optimizer.param_groups, self._grouped_names(), strict=True)
        for number, (group, members) in enumerate(grouped):
            values = _hyperparameters(number, members, state["parameters"])
            # A group without parameters has no saved counterpart and keeps what it has.
            kept = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    # PyTorch leaves these where they are, but a captured graph reads them on the device.
                    values[key] = value.to(group[key].device)
            # The live group's values come first for the order of its keys, which stays as it is.
            own = {key: kept[key] for key in _IMPLEMENTATION if key in kept}
            # PyTorch 2 looks every parameter up in here, which takes a list the square of its length.
            numbers = range(begin, begin + len(members))
            begin += len(members)
            groups.append({**kept, **values, **own, "params": numbers})
        packed = {position[name]: values for name, values in state["state"].items()}
        self.optimizer.load_state_dict({"state": packed, "param_groups": groups})
        self._restore_kinds(packed)

    def names(self) -> list[str]:
        """Stored names of the optimizer's parameters, in PyTorch's numbering.

        Raises:
            CheckpointError: A parameter is not the model's, or two have one name.
        """
        by_id: dict[int, str] = {}
        for part in self.parts:
            canonical = CanonicalNames(part)
            by_id |= {id(parameter): canonical(name) for name, parameter in part.named_parameters()}
        names: list[str] = []
        seen: set[str] = set()
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                where = f"parameter {index} of optimizer group {number}, shape {list(parameter.shape)},"
                if id(parameter) not in by_id:
                    kinds = ", ".join(type(part).__name__ for part in self.parts) or "nothing"
                    raise CheckpointError(f"{where} does not belong to the {kinds} given to OptimizerState.")
                own = by_id[id(parameter)]
                names.append(self.tied.get(own, own))
                if names[-1] in seen:
                    raise CheckpointError(
                        f"{where} goes by the name {names[-1]} of another parameter. Let tied weights on "
                        "one rank be one parameter."
                    )
                seen.add(names[-1])
        return names

    def by_name(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by stored name."""
        parameters = (parameter for parameter, _ in self._parameters())
        return dict(zip(self.names(), parameters, strict=True))

    def match(self, state: Mapping[str, Any]) -> list[str]:
        """Compare with stored state.

        Args:
            state: What :meth:`state_dict` returned, with or without the values of tensors.

        Returns:
            Names of stored parameters that this optimizer does not have.

        Raises:
            CheckpointError: Parameters are missing, of another shape or grouped differently; each is named.
        """
        if absent := [key for key in _SECTIONS if key not in state]:
            raise CheckpointError(
                f"the optimizer state has no entry {absent[0]!r}, so it is not an OptimizerState."
            )
        _check_sections(state)
        saved: Mapping[str, Mapping[str, Any]] = state["parameters"]
        live = self.by_name()
        unclaimed = [name for name in saved if name not in live]
        if missing := [name for name in live if name not in saved]:
            raise CheckpointError(_mismatch(missing, unclaimed))
        for name, parameter in live.items():
            if saved[name]["shape"] != list(parameter.shape):
                raise CheckpointError(
                    f"optimizer state of {name} has shape {saved[name]['shape']}, but the parameter has "
                    f"{list(parameter.shape)}."
                )
        for number, members in enumerate(self._grouped_names()):
            _hyperparameters(number, members, {name: _without_tensors(saved[name]) for name in members})
        return unclaimed

    def check_nothing_left(self, unexpected: Sequence[str]) -> None:
        """Refuse state of parameters that no optimizer took.

        Raises:
            CheckpointError: There are any; names them.
        """
        if unexpected:
            raise CheckpointError(_mismatch([], unexpected))

    def _grouped_names(self) -> list[list[str]]:
        """Stored names of the parameters of each group."""
        rest = iter(self.names())
        return [[next(rest) for _ in group["params"]] for group in self.optimizer.param_groups]

    def _restore_kinds(self, packed: Mapping[int, Mapping[str, object]]) -> None:
        # PyTorch casts floating point state to the parameter's dtype, which rounds fp32 moments of bf16
        # weights.
        parameters = [parameter for parameter, _ in self._parameters()]
        for index, values in packed.items():
            current = self.optimizer.state[parameters[index]]
            for key, saved in values.items():
                if key in current:
                    current[key] = _as_saved(saved, current[key])

    def _parameters(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Every parameter with its group, in PyTorch's numbering."""
        return [(p, group) for group in self.optimizer.param_groups for p in group["params"]]


def _check_sections(state: Mapping[str, Any]) -> None:
    """Refuse what :meth:`OptimizerState.state_dict` never returns."""
    for section in _SECTIONS:
        if not isinstance(state[section], Mapping):
            raise CheckpointError(f"the optimizer state has no table under {section!r}. Restore its file.")
        for name, entry in state[section].items():
            good = isinstance(entry, Mapping)
            if good and section == "parameters":
                good = isinstance(entry.get("shape"), list) and isinstance(
                    entry.get("hyperparameters"), Mapping
                )
            if not good:
                raise CheckpointError(f"the optimizer state of {name} is malformed. Restore its file.")


def _as_saved(saved: object, loaded: object) -> Any:
    """What was loaded, without PyTorch's changes to dtypes, kinds of dict, and texts.

    ``Optimizer.load_state_dict`` makes a text the name of a generator, as of torch 2.13.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, str):
        return saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return type(saved)({key: _as_saved(saved[key], value) for key, value in loaded.items()})
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(loaded)(_as_saved(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded


def _mismatch(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    return (
        "the optimizer's parameters are not those of the checkpoint; not in the checkpoint: "
        f"{sorted(missing)[:10]}, only in the checkpoint: {sorted(unexpected)[:10]}. Build the optimizer "
        "over the same parameters, or delete the optimizer files of the checkpoint to begin with fresh state"
    )


def _hyperparameters(
    number: int, members: Sequence[str], saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """What all members of one group were saved with; empty without members."""
    values: dict[str, Any] = {}
    for name in members:
        stored = saved[name]["hyperparameters"].items()
        here = {key: value for key, value in stored if key not in _IMPLEMENTATION}
        values = values or here
        if different := sorted(key for key in {*values, *here} if not _equal(values.get(key), here.get(key))):
            raise CheckpointError(
                f"parameter group {number} of the optimizer holds {members[0]} and {name}, which were saved "
                f"with different {different[0]}. Group the parameters as when the checkpoint was saved."
            )
    return values


def _without_tensors(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What can be compared before any tensor is read: the rest may be equal under different names."""

    def is_tensor(value: object) -> bool:
        return isinstance(value, torch.Tensor) or (isinstance(value, dict) and value.get(TAG) == "tensor")

    values = saved["hyperparameters"].items()
    return {"hyperparameters": {key: value for key, value in values if not is_tensor(value)}}


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left is right or (left.dtype == right.dtype and torch.equal(left, right))
    return bool(left == right)
