"""An average of the weights, which the model holds wherever it is used and not trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from checkpoint_core import ModelState

from ..arguments import TrainingArguments
from ..distributed.executor import own_part
from ..distributed.transforms import BuiltModel, StepHooks
from ..errors import ConfigurationError
from .optimizers import OptimizerFacade

TRAINING_WEIGHTS = "training_weights"
"""Key of the component with the weights that training continues from, beside the average in `model`."""


class _Switching(Protocol):
    """An optimizer that can put an average into the parameters, and training weights back."""

    def train(self) -> object: ...
    def eval(self) -> object: ...


def _switches(optimizer: Optimizer) -> TypeGuard[_Switching]:
    return all(callable(getattr(optimizer, method, None)) for method in ("train", "eval"))


class AveragedWeights(StepHooks):
    """Puts the average of the weights into the model, and puts the weights back for training.

    Before training, while it evaluates, writes text or saves, and afterwards the model holds the average;
    what it trains on is set aside then, bit for bit. The average is the exponential moving one of `ema_decay`
    kept in the place of the other, or that of an optimizer with `train()` and `eval()`, such as those of
    schedulefree, which computes it. Only trained parameters are averaged. Both are divided among ranks as the
    parameters are.

    Args:
        model: Its state is saved.
        named: The trained parameters by name; what the model has of them in training.
        decay: That of the moving average; None: the optimizer has one.
        switching: The optimizers that have one.

    Raises:
        ConfigurationError: If there is a decay, and a parameter of 16 bits.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        decay: float | None,
        switching: Sequence[_Switching],
    ) -> None:
        self._parameters = [parameter for _, parameter in named]
        self._switching = switching
        self._update = None if decay is None else get_ema_multi_avg_fn(decay)
        for name, parameter in named:
            if decay is not None and parameter.dtype not in (torch.float32, torch.float64):
                raise ConfigurationError(
                    "ema_decay",
                    decay,
                    f"cannot average {name}, whose type {parameter.dtype} loses what a step adds",
                    "keep weights in float32, and set mixed_precision='bf16'",
                )
        self._shows_average = True
        self._other: list[Tensor] | None = None
        """What the model does not hold: the average in training, else what it trains on. None: the same, or
        what the optimizer can compute."""
        self.component = TrainingWeights(model, self)
        """What a checkpoint has beside the average."""

    def begin(self, step: int) -> None:
        """Put the weights back that training continues from; a new average begins with them."""
        self._hide()
        if self._update is not None and self._other is None:
            self._other = self._copies()

    def after_step(self, step: int) -> None:
        """Move the average towards the weights."""
        if self._update is None:
            return
        if self._other is None:
            self._other = self._copies()
        averages = [own_part(average) for average in self._other]
        self._update(averages, [own_part(parameter.detach()) for parameter in self._parameters], 0)

    def end(self) -> None:
        """Leave the average in the model until training continues."""
        self._show()

    def synced_weights(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """A context in which the model holds the average."""
        return self.shown()

    def generating(self) -> AbstractContextManager[None]:
        """A context in which the model holds the average."""
        return self.shown()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context in which the model holds the average; a checkpoint is to be loaded in it."""
        in_training = not self._shows_average
        self._show()
        try:
            yield
        finally:
            if in_training:
                self._hide()

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """A context in which the model holds what it trains on."""
        showed = self._shows_average
        self._hide()
        try:
            yield
        finally:
            if showed:
                self._show()

    def forget(self) -> None:
        """Let average and weights begin anew with what the model holds."""
        self._other = None

    def set_aside(self, *, make: bool = False) -> list[Tensor]:
        """The weights that training continues from, while the model holds the average.

        Args:
            make: Whether they are to be overwritten, and must not be the model's own.
        """
        if make and self._other is None:
            self._other = self._copies()
        return self._other or [parameter.detach() for parameter in self._parameters]

    def extra(self) -> list[Tensor]:
        """What is kept beside the weights in training."""
        return self._other or []

    def of(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """One value for each trained parameter, by the parameter's id."""
        return dict(zip(map(id, self._parameters), values, strict=True))

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def _show(self) -> None:
        if self._shows_average:
            return
        self._shows_average = True
        if self._update is not None:
            self._exchange()
            return
        self._other = self._copies()
        for optimizer in self._switching:
            optimizer.eval()

    @torch.no_grad()
    def _hide(self) -> None:
        if not self._shows_average:
            return
        self._shows_average = False
        if self._update is not None:
            self._exchange()
            return
        for optimizer in self._switching:
            optimizer.train()
        # What it computes from the average is what it was but for rounding.
        for parameter, before in zip(self._parameters, self._other or (), strict=self._other is not None):
            own_part(parameter).copy_(own_part(before))
        self._other = None

    def _exchange(self) -> None:
        """In place, a tensor at a time: wrappers and the optimizer know the parameters by their memory."""
        for parameter, other in zip(self._parameters, self._other or (), strict=self._other is not None):
            held, aside = own_part(parameter), own_part(other)
            before = held.clone()
            held.copy_(aside)
            aside.copy_(before)


class TrainingWeights(ModelState):
    """The weights that training continues from, as a state component in the form of a model's weights.

    It is saved and restored while the model holds the average, which is its ordinary component.
    """

    def __init__(self, model: nn.Module, average: AveragedWeights) -> None:
        super().__init__(model)
        self._average = average

    def state_dict(self) -> dict[str, object]:
        """The trained weights by name."""
        return dict(self._named(self._average.set_aside()))

    def tensors(self) -> dict[str, Tensor]:
        """Memory for the trained weights, by name."""
        return self._named(self._average.set_aside(make=True))

    def _named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        by_id = self._average.of(values)
        live = super().tensors()
        return {name: by_id[id(value)] for name, value in live.items() if id(value) in by_id}


def average_weights(args: TrainingArguments, built: BuiltModel, optimizer: Optimizer) -> None:
    """Add to a model what keeps an average of its weights, if the arguments or the optimizer ask for one.

    Raises:
        ConfigurationError: If both do, or a parameter has 16 bits.
    """
    members = optimizer.optimizers if isinstance(optimizer, OptimizerFacade) else (optimizer,)
    switching = [each for each in members if _switches(each)]
    if args.ema_decay is None and not switching:
        return
    if args.ema_decay is not None and switching:
        raise ConfigurationError(
            "ema_decay",
            args.ema_decay,
            f"adds an average of the weights to that of {type(switching[0]).__name__}",
            "leave one of them out",
        )
    named = [(name, p) for name, p in built.named_parameters() if p.requires_grad]
    built.average = AveragedWeights(built.model, named, args.ema_decay, switching)
    built.hooks.append(built.average)
