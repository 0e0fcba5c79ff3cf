"""What several optimizers need to look like one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


class OptimizerFacade(Optimizer):
    """One or more optimizers behind the interface of one.

    Groups and state are the live ones of the members, in their order; so learning-rate schedules, loss
    scalers and checkpoints work as with any optimizer.

    Args:
        optimizers: The members; no parameter may belong to two of them.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # torch's __init__ would take parameters; what else it sets up, __setstate__ sets up too.
        super().__setstate__({"optimizers": tuple(optimizers), "defaults": dict(optimizers[0].defaults)})

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """The groups of all members; each dict is the member's own."""
        return [group for member in self.optimizers for group in member.param_groups]

    @property
    def state(self) -> JointState:  # type: ignore[override]
        """The state of all members, by parameter."""
        return JointState(self.optimizers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of every member's parameters."""
        for member in self.optimizers:
            member.zero_grad(set_to_none)

    def add_param_group(self, param_group: Group) -> None:
        """Refused, because it does not say which member is meant.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{type(self).__name__} cannot tell which of its optimizers a new group is for; "
            "call add_param_group of one of its `optimizers`"
        )

    def state_dict(self) -> dict[str, Any]:
        """State and groups in torch's form, with positions counted through all members."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        packed: dict[str, Any] = {"state": {}, "param_groups": []}
        first = 0
        for member in self.optimizers:
            own = member.state_dict()
            packed["state"] |= {first + index: values for index, values in own["state"].items()}
            packed["param_groups"] += [
                {**group, "params": [first + index for index in group["params"]]}
                for group in own["param_groups"]
            ]
            first += sum(len(group["params"]) for group in own["param_groups"])
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, packed)
            packed = packed if changed is None else changed
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each member its part of what `state_dict` returned.

        Raises:
            ValueError: If the groups are not as many as here, or of other sizes.
        """
        given = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, given)
            given = given if changed is None else changed
        groups: list[Group] = list(given["param_groups"])
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the loaded state has {len(groups)} parameter groups, and there are {len(self.param_groups)}"
            )
        for member in self.optimizers:
            count = len(member.param_groups)
            own, groups = groups[:count], groups[count:]
            indices = {index for group in own for index in group["params"]}
            state = {index: values for index, values in given["state"].items() if index in indices}
            member.load_state_dict({"state": state, "param_groups": own})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(member) for member in self.optimizers)})"


class JointState(Mapping[Tensor, dict[str, Any]]):
    """The state of several optimizers, by parameter; the dicts are the live ones.

    Args:
        optimizers: Whose state.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                state: dict[str, Any] = optimizer.state[parameter]
                return state
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
