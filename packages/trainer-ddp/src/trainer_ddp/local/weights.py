"""Those tensors of a model that ranks change when they train by themselves."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from checkpoint_core import ModelState


class Weights:
    """The trained parameters and the persistent buffers of a model, under the model's own names.

    Which parameters are trained is decided once: those that need a gradient or that the optimizer works on.
    Tied parameters come once. Buffers that are not saved, such as caches, are each rank's own affair, and may
    have other shapes on other ranks.

    Args:
        model: The model, wrapped or not.
        optimizer: What steps it, if anything does.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._state = ModelState(model)
        groups = [] if optimizer is None else optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        named = self._named(nn.Parameter)
        self.parameters = {name: p for name, p in named.items() if p.requires_grad or id(p) in held}
        """The trained parameters by name."""

    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name; looked up anew, as modules may replace theirs."""
        return {name: value for name, value in self._named(Tensor).items() if not _is_parameter(value)}

    def all(self) -> dict[str, Tensor]:
        """Trained parameters and buffers by name."""
        return {**self.parameters, **self.buffers()}

    def _named(self, kind: type[Tensor]) -> dict[str, Tensor]:
        found: dict[int, str] = {}
        tensors = self._state.tensors()
        for name, value in tensors.items():
            if isinstance(value, kind):
                found.setdefault(id(value), name)
        return {name: tensors[name] for name in found.values()}


def _is_parameter(value: Tensor) -> bool:
    return isinstance(value, nn.Parameter)
