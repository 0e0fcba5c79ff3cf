"""The built-in AdamW, several optimizers that look like one, and the step inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import AdamW, Optimizer

from ..arguments import MinimalTrainingArguments
from ..distributed.executor import own_part
from ..errors import ConfigurationError

NamedParameters = Iterable[tuple[str, nn.Parameter]]
OptimizerFactory = Callable[[NamedParameters], Optimizer]
"""Makes an optimizer of named parameters; with `optimizer_groups`, of torch's group dicts with named ones."""

NamedTensors = list[tuple[str, nn.Parameter]]

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


def adamw_of_groups(
    args: MinimalTrainingArguments, groups: list[Group], *, may_be_empty: bool = False
) -> AdamW:
    """AdamW over group dicts with named parameters; options that a group does not give come from `args`.

    Raises:
        ConfigurationError: If there is no parameter, unless that may be.
    """
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    if not parameters and not may_be_empty:
        raise ConfigurationError(
            "model",
            "frozen",
            "has no trainable parameter",
            "set requires_grad=True on some of its parameters",
        )
    has_kernel = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    # torch's kernel takes no DTensors beside plain tensors, which a layout of tensors alone leaves.
    has_kernel = has_kernel and len({own_part(p) is p for p in parameters}) == 1
    betas = (args.adam_beta1, args.adam_beta2)
    # None rather than False where there is no kernel: torch then takes `foreach` if the device has it.
    fused = True if has_kernel else None
    return AdamW(groups, args.learning_rate, betas, args.adam_epsilon, args.weight_decay, fused=fused)


def schedule_free_of_groups(args: MinimalTrainingArguments, groups: list[Group]) -> Optimizer:
    """AdamWScheduleFree over group dicts with named parameters; options come from `args`.

    It has the warm-up itself, as its average leaves out what a low learning rate has changed little.

    Raises:
        ConfigurationError: If schedulefree is not installed.
    """
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer: Optimizer = schedule_free_class()(
        groups,
        lr=args.learning_rate,
        betas=betas,
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        **args.optim_kwargs,
    )
    return optimizer


def schedule_free_class() -> Any:
    """The class AdamWScheduleFree.

    Raises:
        ConfigurationError: If schedulefree is not installed.
    """
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError as error:
        raise ConfigurationError(
            "optim",
            "schedule_free_adamw",
            "needs schedulefree, which is not installed",
            "install it with `pip install 'trainer-core[schedulefree]'`",
        ) from error
    return AdamWScheduleFree


def _reason_alone(own_name: str, parameter: Tensor) -> str:
    if own_name == "bias" or own_name.endswith("_bias"):
        return "bias"
    return "fewer than two dimensions" if parameter.ndim < 2 else ""


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
            f"{type(self).__name__} cannot tell which of its optimizers a new group is for. Call "
            "add_param_group of one of its `optimizers`."
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
            packed |= {entry: own[entry] for entry in own if entry not in packed}
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
                f"the loaded state has {len(groups)} parameter groups, but the optimizers have "
                f"{len(self.param_groups)}."
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


class Multiopt(OptimizerFacade):
    """Several optimizers that step together, such as Muon for matrices and AdamW for the rest.

    Args:
        optimizers: The members, in the order in which they step and in which their groups are counted.
            Learning-rate logs show the first group of the first one.

    Raises:
        ConfigurationError: If there are none, or two of them have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        _check_members(optimizers)
        super().__init__(optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member.

        Args:
            closure: Computes the loss again, with gradients; called once.

        Returns:
            What the closure returned, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.optimizers:
            member.step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether every member heeds `found_inf` and `grad_scale` by itself; asked by torch's GradScaler."""
        return all(getattr(member, "_step_supports_amp_scaling", False) for member in self.optimizers)

    @property
    def found_inf(self) -> Tensor:
        """Set it to a device scalar; 1 makes the step leave everything as it is."""
        return self._shared("found_inf")

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        self._share("found_inf", value)

    @found_inf.deleter
    def found_inf(self) -> None:
        self._unshare("found_inf")

    @property
    def grad_scale(self) -> Tensor:
        """Set it to a device scalar by which the step divides the gradients."""
        return self._shared("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Tensor | None) -> None:
        self._share("grad_scale", value)

    @grad_scale.deleter
    def grad_scale(self) -> None:
        self._unshare("grad_scale")

    def _shared(self, name: str) -> Tensor:
        value: Tensor = getattr(self.optimizers[0], name)  # AttributeError when unset, as torch expects
        return value

    def _share(self, name: str, value: Tensor | None) -> None:
        for member in self.optimizers:
            setattr(member, name, value)

    def _unshare(self, name: str) -> None:
        for member in self.optimizers:
            delattr(member, name)


def _check_members(optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ConfigurationError("optimizer_groups", [], "makes no optimizer", "give at least one")
    owner: dict[int, str] = {}
    for member in optimizers:
        kind = type(member).__name__
        for parameter in (p for group in member.param_groups for p in group["params"]):
            if id(parameter) in owner:
                raise ConfigurationError(
                    "optimizer_groups",
                    f"{owner[id(parameter)]} and {kind}",
                    f"update the same parameter of shape {list(parameter.shape)}",
                    "give each parameter to one optimizer",
                )
            owner[id(parameter)] = kind


_SETTING = "fuse_optim_with_backward"


class OptimizerInBackward(OptimizerFacade):
    """An optimizer that does its work during the backward pass.

    A hook on each trainable parameter adds the squared norm of its gradient to a sum on the device, steps
    that parameter alone, and frees the gradient. The optimizer behind is an ordinary one over all of them:
    its groups follow a learning-rate schedule, and its state is saved and loaded as if it had never been
    fused, in both directions.

    Several backward passes per step, clipping, loss scaling and skipping a step do not go with it, because
    a gradient is gone before the others are known.

    Args:
        named_parameters: All parameters; frozen ones get no hook. A tied weight comes once.
        factory: Makes the ordinary optimizer, of named parameters. It must treat each parameter by itself
            and keep no counter in its groups.

    Raises:
        ConfigurationError: If the factory makes several optimizers, or nothing is trainable.
    """

    def __init__(self, named_parameters: NamedParameters, factory: OptimizerFactory) -> None:
        named = list({id(p): (name, p) for name, p in named_parameters if p.requires_grad}.values())
        if not named:
            raise ConfigurationError(
                "model",
                "frozen",
                "has no trainable parameter",
                "set requires_grad=True on some of its parameters",
            )
        optimizer = factory(named)
        if isinstance(optimizer, Multiopt):
            raise ConfigurationError(
                _SETTING,
                True,
                "works with one optimizer, but optimizer_groups make several",
                "take the factories out of optimizer_groups",
            )
        super().__init__([optimizer])
        self.steps = 0
        self._optimizer = optimizer
        self._names = {id(p): name for name, p in named}
        self._arrived: set[int] = set()
        self._square = torch.zeros((), device=named[0][1].device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(number))
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Count the step, which the backward pass has made already.

        Raises:
            TypeError: If a closure is given.
        """
        if closure is not None:
            raise TypeError(
                "OptimizerInBackward has stepped during backward, so a closure comes too late. Call step() "
                "without one."
            )
        self._arrived.clear()
        self.steps += 1

    def take_norm(self) -> Tensor:
        """The 2-norm of all gradients since the last call, which begins a new sum.

        Returns:
            float32 scalar on the device; nothing waits for it.
        """
        norm = self._square.sqrt()
        self._square.zero_()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no hook has taken, such as those of a backward pass that failed."""
        self._arrived.clear()
        super().zero_grad(set_to_none)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook_of(self, number: int) -> Callable[[Tensor], None]:
        """The hook of the parameters of one group, which is looked up anew: loading state replaces it."""
        optimizer = self._optimizer

        def hook(parameter: Tensor) -> None:
            self._refuse_second(parameter)
            self._add_norm(parameter)
            self._step_alone(parameter, optimizer.param_groups[number])
            parameter.grad = None

        return hook

    def _refuse_second(self, parameter: Tensor) -> None:
        if id(parameter) in self._arrived:
            raise ConfigurationError(
                _SETTING,
                True,
                f"needs one gradient for each parameter and step, but {self._names[id(parameter)]} got a "
                "second one when the first was used up",
                "run one backward pass per step, and no reentrant activation checkpointing",
            )
        self._arrived.add(id(parameter))

    @torch.no_grad()
    def _add_norm(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            norm = norm.to(self._square.device, non_blocking=True)
            self._square.addcmul_(norm, norm)

    def _step_alone(self, parameter: Tensor, group: Group) -> None:
        """Let the optimizer step as if it had this parameter only."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        alone = {**group, "params": [parameter]}
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        if changed := [name for name in group if name != "params" and alone[name] is not group[name]]:
            raise ConfigurationError(
                _SETTING,
                True,
                f"cannot be used with {type(optimizer).__name__}, which counts in its groups "
                f"({', '.join(changed)}), once per parameter",
                "use an optimizer that keeps its counters per parameter",
            )
