"""The outer optimizer of DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .combining import working_dtype
from .optimizer_state import check_names, host_copy, tensors_of


class OuterOptimizer:
    """Steps from the weights that all ranks began with, along what they have moved by on average.

    The outer gradient is anchor - mean, where the anchor is the weights after the last outer step, and
    `torch.optim.SGD` steps the anchor with it (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). All
    ranks do the same with the same numbers. Anchor and momentum are float32 at least; with an accelerator
    they are kept in host memory, because they are used rarely.

    Args:
        weights: What is trained, by name.
        learning_rate: Of the outer steps.
        momentum: Nesterov's, or 0.
    """

    def __init__(self, weights: Mapping[str, Tensor], learning_rate: float, momentum: float) -> None:
        self._weights = weights
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._anchor: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}

    @property
    def anchored(self) -> bool:
        """Whether there is an anchor."""
        return bool(self._anchor)

    def forget(self) -> None:
        """Drop anchor and momentum."""
        self._anchor, self._velocity = {}, {}

    def take_anchor(self) -> None:
        """Take the weights, which must be equal on all ranks, as the anchor, and begin without momentum."""
        self._anchor = {name: _kept(weight, weight.dtype) for name, weight in self._weights.items()}
        self._velocity = {}

    def step(self, means: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make an outer step for some of the weights.

        Args:
            means: Their means over the ranks, by name, in the type of the anchor.

        Returns:
            The new anchor of these weights, on the device of the means; not to be written to.
        """
        anchor = {name: self._anchor[name].to(mean.device) for name, mean in means.items()}
        for name, mean in means.items():
            anchor[name].grad = anchor[name] - mean
        stepping = torch.optim.SGD(
            list(anchor.values()),
            lr=self._learning_rate,
            momentum=self._momentum,
            nesterov=self._momentum > 0,
        )
        for name, value in anchor.items():
            if name in self._velocity and self._momentum:
                stepping.state[value]["momentum_buffer"] = self._velocity[name].to(value.device)
        stepping.step()
        for name, value in anchor.items():
            value.grad = None
            self._anchor[name] = _back(value)
            if self._momentum:
                self._velocity[name] = _back(stepping.state[value]["momentum_buffer"])
        return anchor

    def state_dict(self) -> dict[str, object]:
        """Anchor and momentum by name of the weight; nothing before there is an anchor."""
        if not self.anchored:
            return {}
        return {"anchor": dict(self._anchor), "momentum": dict(self._velocity)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Put back what `state_dict` returned, on any number of ranks.

        Raises:
            checkpoint_core.CheckpointError: If it is of other weights.
        """
        anchor = tensors_of("the anchor of the outer optimizer", state.get("anchor", {}))
        velocity = tensors_of("the momentum of the outer optimizer", state.get("momentum", {}))
        for what, values in (("anchor", anchor), ("momentum", velocity)):
            if values:
                check_names(f"the {what} of the outer optimizer", values, self._weights)
        self._anchor = self._like_weights(anchor)
        self._velocity = self._like_weights(velocity)

    def _like_weights(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _kept(value, self._weights[name].dtype) for name, value in values.items()}


def _kept(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy to keep, in the type that weights of a type are combined in."""
    return host_copy(value).to(working_dtype(dtype))


def _back(value: Tensor) -> Tensor:
    """A value to keep, without a copy where it is on the host already."""
    return value if value.device.type == "cpu" else value.cpu()
