"""The state that an optimizer keeps for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from checkpoint_core import OptimizerState
from dist_env import get_logger
from trainer_core import Multiopt

from .combining import RankCombiner
from .tensors import Path, tensors_in, with_tensors

logger = get_logger(__name__)

ByName = dict[str, dict[str, Any]]
Entry = tuple[MutableMapping[Tensor, Any], Tensor, dict[str, Any]]
"""The states of an optimizer, a parameter, and its own state."""


class Moments:
    """What an optimizer keeps for each parameter, by the parameter's name.

    Args:
        optimizer: The optimizer.
        model: The model that owns its parameters.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._named = OptimizerState(optimizer, model)

    def live(self) -> ByName:
        """The optimizer's own dicts, for parameters that have something in them."""
        kept = ((name, self._optimizer.state.get(p)) for name, p in self._named.by_name().items())
        return {name: values for name, values in kept if values}

    def leaves(self, names: Iterable[str]) -> dict[tuple[str, Path], Tensor]:
        """The tensors in the state of some parameters, in an order that is the same on all ranks."""
        live = self.live()
        return {(name, path): value for name in names for path, value in tensors_in(live[name])}

    def state(self, replace: Callable[[Tensor], object]) -> dict[str, object]:
        """The state by name as a checkpoint holds it, with something in the place of each tensor."""
        state = cast(Mapping[str, object], self._named.state_dict()["state"])
        return {name: with_tensors(values, replace) for name, values in state.items()}

    def load(self, state: Mapping[str, object]) -> None:
        """Put state by name into the optimizer; its options stay.

        Raises:
            checkpoint_core.CheckpointError: If it is of other parameters.
        """
        self._named.load_state_dict({"parameters": self._named.state_dict()["parameters"], "state": state})

    def take_out_others(self, names: Collection[str]) -> list[Entry]:
        """Remove the state of all but some parameters; the optimizer is then as if it had not used them.

        Returns:
            What `put_in` takes.
        """
        members = self._optimizer.optimizers if isinstance(self._optimizer, Multiopt) else (self._optimizer,)
        kept = set(names)
        others = [p for name, p in self._named.by_name().items() if name not in kept]
        found = [(member.state, p) for p in others for member in members if p in member.state]
        return [(states, p, states.pop(p)) for states, p in found]

    def put_in(self, entries: Sequence[Entry]) -> None:
        """Put back what `take_out_others` returned."""
        for states, parameter, values in entries:
            states[parameter] = values

    def uniform(self, ranks: RankCombiner) -> list[str]:
        """Names of the parameters whose state has the same form on all ranks; collective.

        A parameter that only some ranks have used has state only there, of which there is no mean.
        """
        live = self.live()
        names = self._named.names()
        same = ranks.agree([_fingerprint(live.get(name)) for name in names])
        other = [name for name, is_same in zip(names, same, strict=True) if not is_same]
        if other:
            logger.info(
                "the mean of the optimizer's state leaves out %d parameters that not all ranks have used "
                "alike, the first is %s",
                len(other),
                other[0],
            )
        return [name for name, is_same in zip(names, same, strict=True) if is_same and name in live]


def _fingerprint(values: dict[str, Any] | None) -> int:
    """A number for the form of some state: tensors by dtype and shape, everything else by value."""
    form = None
    if values is not None:
        tensors = [(path, str(value.dtype), tuple(value.shape)) for path, value in tensors_in(values)]
        form = (
            tensors,
            sorted((str(key), with_tensors(item, lambda _: "tensor")) for key, item in values.items()),
        )
    return int.from_bytes(blake2b(repr(form).encode(), digest_size=8).digest()) >> 2
