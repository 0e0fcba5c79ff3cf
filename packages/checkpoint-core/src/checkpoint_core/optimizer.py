"""The state of an optimizer, keyed by parameter name instead of position."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from checkpoint_core.encoding import Path, join_path
from checkpoint_core.errors import CheckpointError
from checkpoint_core.names import CanonicalNames

# Positions and a copy of the names, which PyTorch keeps in its parameter groups; names replace both.
_NOT_HYPERPARAMETERS = ("params", "param_names")


class OptimizerState:
    """An optimizer as a state component.

    ``state_dict()`` holds ``param_groups`` (hyperparameters and the parameters' names), ``state`` (by
    parameter name, then by state name, such as ``exp_avg``) and ``shapes`` (of every parameter, by name).

    Args:
        optimizer: Any optimizer with PyTorch's ``state_dict`` protocol.
        model: The model that owns the optimizer's parameters, wrapped or not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self.model = model

    @staticmethod
    def tensor_name(path: Path) -> str:
        """The name of a state tensor in the file: ``<parameter name>.<state name>``."""
        return join_path(path[1:] if path[0] == "state" else path)

    def state_dict(self) -> dict[str, object]:
        """The state by parameter name.

        Returns:
            The live tensors, not copies.

        Raises:
            CheckpointError: The optimizer has a parameter that is not the model's.
        """
        names = self._names()
        packed = self.optimizer.state_dict()
        groups = [
            {**{k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS}, "params": group_names}
            for group, group_names in zip(packed["param_groups"], self._grouped(names), strict=True)
        ]
        return {
            "param_groups": groups,
            "state": {names[index]: values for index, values in packed["state"].items()},
            "shapes": {name: list(p.shape) for name, p in zip(names, self._parameters(), strict=True)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore hyperparameters and per-parameter state by name.

        The optimizer may hold its parameters in another order than when it was saved, as long as each of its
        groups comes from one saved group. Tensors keep the dtype they were saved with.

        Args:
            state: What :meth:`state_dict` returned.

        Raises:
            CheckpointError: Parameters are missing, unexpected, of another shape or grouped differently.
        """
        names = self._names()
        self._check(state, names)
        position = {name: index for index, name in enumerate(names)}
        saved_group = {name: group for group in state["param_groups"] for name in group["params"]}
        groups = []
        for number, group_names in enumerate(self._grouped(names)):
            origins = {id(saved_group[name]): saved_group[name] for name in group_names}
            if len(origins) > 1:
                raise CheckpointError(
                    f"parameter group {number} of the optimizer mixes parameters of {len(origins)} saved "
                    "groups; group the parameters as when the checkpoint was saved"
                )
            # A group without parameters has no saved counterpart and keeps what it has.
            source = next(iter(origins.values()), self.optimizer.param_groups[number])
            values = {key: value for key, value in source.items() if key not in _NOT_HYPERPARAMETERS}
            groups.append({**values, "params": [position[name] for name in group_names]})
        packed = {position[name]: values for name, values in state["state"].items()}
        self.optimizer.load_state_dict({"state": packed, "param_groups": groups})
        self._restore_dtypes(packed)

    def _restore_dtypes(self, packed: Mapping[int, Mapping[str, object]]) -> None:
        # PyTorch casts floating point state to the parameter's dtype, which rounds fp32 moments of bf16
        # weights.
        parameters = self._parameters()
        for index, values in packed.items():
            current = self.optimizer.state[parameters[index]]
            for key, saved in values.items():
                loaded = current.get(key)
                if (
                    isinstance(saved, torch.Tensor)
                    and isinstance(loaded, torch.Tensor)
                    and saved.dtype != loaded.dtype
                ):
                    current[key] = saved.to(loaded.device)

    def _check(self, state: Mapping[str, Any], names: list[str]) -> None:
        if absent := [key for key in ("param_groups", "state", "shapes") if key not in state]:
            raise CheckpointError(
                f"the optimizer state has no entry {absent[0]!r}; it is not an OptimizerState"
            )
        saved = {name for group in state["param_groups"] for name in group["params"]}
        missing = [name for name in names if name not in saved]
        unexpected = sorted(saved - set(names))
        if missing or unexpected:
            raise CheckpointError(
                "the optimizer's parameters are not those of the checkpoint; not in the checkpoint: "
                f"{missing[:10]}, only in the checkpoint: {unexpected[:10]}. Build the optimizer over the "
                "same parameters, or delete the optimizer files of the checkpoint to begin with fresh state"
            )
        for name, parameter in zip(names, self._parameters(), strict=True):
            if state["shapes"][name] != list(parameter.shape):
                raise CheckpointError(
                    f"optimizer state of {name} has shape {state['shapes'][name]}, the parameter has "
                    f"{list(parameter.shape)}"
                )

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _names(self) -> list[str]:
        """Canonical names of the optimizer's parameters, in PyTorch's numbering."""
        canonical = CanonicalNames(self.model)
        by_id = {id(parameter): canonical(name) for name, parameter in self.model.named_parameters()}
        names = []
        for number, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in by_id:
                    raise CheckpointError(
                        f"parameter {index} of optimizer group {number}, shape {list(parameter.shape)}, "
                        f"does not belong to the {type(self.model).__name__} given to OptimizerState"
                    )
                names.append(by_id[id(parameter)])
        return names

    def _grouped(self, names: list[str]) -> list[list[str]]:
        rest = iter(names)
        return [[next(rest) for _ in group["params"]] for group in self.optimizer.param_groups]
