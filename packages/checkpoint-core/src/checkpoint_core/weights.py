"""The state of a model: parameters and persistent buffers under the model's own names."""

import logging
from collections.abc import Mapping

import torch
from torch import nn

from checkpoint_core.encoding import check_storable, tensor_identity
from checkpoint_core.errors import CheckpointError
from checkpoint_core.names import CanonicalNames, unwrap

_logger = logging.getLogger(__name__)
_SHOWN = 10


class ModelState:
    """Weights of a model as a state component, stored in the Hugging Face layout.

    Args:
        model: The model. Wrappers (DDP, torch.compile, activation checkpointing) may be on it when saving,
            when loading, both, or neither.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def unwrapped(self) -> nn.Module:
        """The model inside its wrappers."""
        return unwrap(self.model)

    def state_dict(self) -> dict[str, object]:
        """All parameters and persistent buffers by canonical name, tied ones under each of their names.

        Returns:
            The live tensors, not copies.

        Raises:
            CheckpointError: A module keeps extra state, which the layout has no place for, or a tensor is
                sharded or on the meta device.
        """
        return dict(self._tensors())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Copy tensors into the model's parameters and buffers, which keep their dtype and device.

        A tied weight may be there under any of its names. Nothing is changed unless every name and shape
        fits.

        Args:
            state: Tensors by canonical name.

        Raises:
            CheckpointError: Tensors are missing, unexpected or of another shape; each is named.
        """
        targets = self._tensors()
        ties = _tie_groups(targets)
        _check_match(targets, state, ties)
        cast = [name for name in targets if name in state and _dtype(state[name]) != targets[name].dtype]
        if cast:
            _logger.warning(
                "casting %d tensors while loading weights, the first is %s: %s in the file, %s in the model",
                len(cast),
                cast[0],
                _dtype(state[cast[0]]),
                targets[cast[0]].dtype,
            )
        with torch.no_grad():
            for names in ties:
                source = state[next(name for name in names if name in state)]
                if isinstance(source, torch.Tensor):
                    targets[names[0]].copy_(source)

    def _tensors(self) -> dict[str, torch.Tensor]:
        canonical = CanonicalNames(self.model)
        tensors: dict[str, torch.Tensor] = {}
        for raw, value in self.model.state_dict().items():
            name = canonical(raw)
            if not isinstance(value, torch.Tensor) or name.split(".")[-1] == "_extra_state":
                owner = name.rpartition(".")[0] or "the model"
                raise CheckpointError(
                    f"{owner} returns extra state ({name}), which safetensors weights have no place for; "
                    "declare it as a component of its own"
                )
            check_storable(value, f"weight {name}")
            tensors[name] = value
        return tensors


def _tie_groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names grouped by the memory they show, in the model's order; most groups have one name."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        identity = tensor_identity(tensor)
        groups.setdefault(name if identity is None else identity, []).append(name)
    return list(groups.values())


def _check_match(
    targets: Mapping[str, torch.Tensor], state: Mapping[str, object], ties: list[list[str]]
) -> None:
    missing = [names[0] for names in ties if not any(name in state for name in names)]
    unexpected = [name for name in state if name not in targets]
    wrong = []
    for name, target in targets.items():
        source = state.get(name)
        if source is not None and (not isinstance(source, torch.Tensor) or source.shape != target.shape):
            wrong.append(f"{name} ({_shape(source)} in the file, {_shape(target)} in the model)")
    problems = [
        f"{title}: {_listing(names)}"
        for title, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights do not fit the model; {'; '.join(problems)}. Build the model with the "
            "configuration it was saved with"
        )
    _check_ties(state, ties)


def _check_ties(state: Mapping[str, object], ties: list[list[str]]) -> None:
    for names in ties:
        present = [name for name in names if name in state]
        first = state[present[0]]
        for name in present[1:]:
            other = state[name]
            same = (
                isinstance(first, torch.Tensor)
                and isinstance(other, torch.Tensor)
                and (other is first or (other.dtype == first.dtype and torch.equal(other, first)))
            )
            if not same:
                raise CheckpointError(
                    f"the model ties {present[0]} and {name}, but the file holds different values for them; "
                    "build the model without tied weights"
                )


def _dtype(value: object) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
