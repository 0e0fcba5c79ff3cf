"""What routers of experts add to a loss: how evenly they spread the tokens of each row, exactly once.

The balance of a row is a mean over its own tokens, whatever other rows are computed with it. So it adds up
over rows, microbatches and ranks as token losses do, each row weighted by its tokens that count. It is
computed behind the forward pass, outside of what activation checkpointing recomputes. Its gradient enters
with that of the loss, or, on a stage that has no loss, at what the stage hands on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dataloader_dispatch import is_ignored

from ..errors import ConfigurationError
from .token_loss import OnTargets, TokenLoss, auxiliary_loss_is_added, predict


class RowBalance(NamedTuple):
    """How one router has spread the tokens of some rows."""

    loss: Tensor
    """Of each row, float32 `[rows]`: 1 where all experts get equally much, and experts over used ones where
    always the same ones get everything."""
    load: Tensor
    """Tokens that count sent to each expert, float32 `[experts]`."""
    entropy: Tensor
    """Of the scores of each token, summed over those that count, in nats: float32 scalar. Of the positions
    here alone, where rows are divided."""
    tokens: Tensor
    """Those of each row that count: float32 `[rows]`."""


def row_balance(
    logits: Tensor, chosen: Tensor, counted: Tensor, *, sigmoid: bool, groups: Sequence[ProcessGroup] = ()
) -> RowBalance:
    """Measure the balance of each row (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20, without alpha).

    Args:
        logits: Of the router, floating `[rows x positions, experts]`; differentiated through.
        chosen: Experts of each token, int64 `[rows x positions, used]`.
        counted: Which positions count, bool `[rows, positions]`.
        sigmoid: Whether scores are sigmoids, which are normalised here, or a softmax.
        groups: Where rows are divided: who has other positions of them, as the product of these groups. All
            of them get the balance of whole rows, each with the gradient of its own positions.
    """
    rows, positions = counted.shape
    experts, used = logits.shape[-1], chosen.shape[-1]
    wide = logits.float()
    if sigmoid:
        scores = wide.sigmoid()
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        scores = wide.softmax(dim=-1)
    mask = counted.to(scores.dtype)
    tokens = mask.sum(dim=1, keepdim=True)
    share = (scores.view(rows, positions, experts) * mask.unsqueeze(-1)).sum(dim=1)
    picked = mask.unsqueeze(-1).expand(rows, positions, used).reshape(rows, -1)
    load = scores.new_zeros(rows, experts).scatter_add_(1, chosen.reshape(rows, -1), picked)
    if groups:
        sums = torch.cat([share.detach(), load, tokens], dim=1)
        for group in groups:
            dist.all_reduce(sums, group=group)
        whole, load, tokens = torch.split(sums, [experts, experts, 1], dim=1)
        share = share + (whole - share.detach())
    some = tokens.clamp(min=1)
    often = load * (experts / used) / some
    with torch.no_grad():
        entropy = (torch.special.entr(scores).sum(dim=-1) * mask.flatten()).sum()
    return RowBalance((often * share / some).sum(dim=-1), load.sum(dim=0), entropy, tokens.squeeze(1))


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router as Hugging Face's are: it returns logits, weights and chosen experts."""
    # Its weight may be None or stand for one that another stage has.
    own = {**module._parameters, **module._buffers}
    return _numbers(module) is not None and "weight" in own


def _numbers(module: nn.Module) -> tuple[int, int] | None:
    """Experts to choose from, and how many are chosen; None where a module does not say."""
    experts, used = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    return (experts, used) if isinstance(experts, int) and isinstance(used, int) else None


class RouterShape(NamedTuple):
    """What the balance of a router depends on, beside what it has seen."""

    experts: int
    """Experts that it chooses from."""
    used: int
    """How many of them a token goes to."""
    sigmoid: bool
    """Whether its scores are sigmoids, which a bias corrects."""


def router_shape(router: nn.Module) -> RouterShape:
    """Read the shape of a module for which `is_router` holds."""
    corrected = getattr(router, "e_score_correction_bias", None) is not None
    sigmoid = corrected or getattr(router, "scores", None) == "sigmoid"
    if (numbers := _numbers(router)) is None:
        told = ", ".join(f"{name}={getattr(router, name, None)!r}" for name in ("num_experts", "top_k"))
        raise TypeError(
            f"The router {type(router).__name__} has {told}, and both must be whole numbers: how many "
            "experts it chooses from, and how many a token goes to. Set both in its __init__, as in "
            "self.num_experts, self.top_k = 8, 2."
        )
    return RouterShape(*numbers, sigmoid)


class RowParts(NamedTuple):
    """Who has other positions of the rows that a rank computes."""

    context: ProcessGroup | None = None
    """Those that divide rows and their labels."""
    tensor: ProcessGroup | None = None
    """Those that have the same labels, and divide rows among layers: rank after rank."""

    def find(self, counted: Tensor, tokens: int) -> tuple[Tensor | None, list[ProcessGroup]]:
        """Which of the tokens of a router count, `[rows, positions]`, and who has other positions.

        The first is None if labels do not tell.
        """
        groups = [] if self.context is None else [self.context]
        if self.tensor is None:
            return _by_position(counted, tokens), groups
        ranks = self.tensor.size()
        if counted.ndim == 2:
            if counted.shape[1] % ranks:
                return None, groups
            counted = counted.chunk(ranks, dim=1)[self.tensor.rank()]
        return _by_position(counted, tokens), [*groups, self.tensor]


class RouterLosses:
    """Watches the routers of a model in training, and computes what they add to the loss.

    Args:
        routers: Those that this rank computes, by their numbers in the whole model.
        shapes: Those of all routers of the whole model.
        coefficient: Weight of the balance loss; 0: only the figures are wanted.
        parts: How rows are divided.
        moves_biases: Whether biases follow from the figures.
    """

    def __init__(
        self,
        routers: Mapping[int, nn.Module],
        shapes: Sequence[RouterShape],
        coefficient: float,
        parts: RowParts | None = None,
        *,
        moves_biases: bool = False,
    ) -> None:
        self._parts = parts or RowParts()
        self._moves_biases = moves_biases
        self.coefficient = coefficient
        self.shapes = shapes
        self._open = False
        self._routers = dict(routers)
        self._taken: list[tuple[int, Tensor, Tensor]] = []
        self._sums: dict[int, list[Tensor]] = {}
        for number, module in routers.items():
            module.register_forward_hook(self._watcher(number))

    def scale(self, number: int) -> float:
        """What the mean of `row_balance` over rows is multiplied by in the loss, beside the coefficient.

        With sigmoids 1, as DeepSeek-V3 adds up the losses of its layers. With softmax the experts used over
        the number of routers, so that one row in one layer has exactly the loss of transformers.
        """
        shape = self.shapes[number]
        return 1.0 if shape.sigmoid else shape.used / len(self.shapes)

    def _watcher(self, number: int) -> Callable[[nn.Module, object, object], None]:
        def watch(module: nn.Module, given: object, output: object) -> None:
            # Recomputation in the backward pass comes here as well, when nothing is open.
            if not self._open:
                return
            if isinstance(output, tuple) and len(output) == 3:
                logits, _, chosen = output
                self._taken.append((number, logits, chosen))
            elif self.coefficient:
                raise ConfigurationError(
                    "model",
                    type(module).__name__,
                    "is a router that does not return logits, weights and chosen experts, so its balance "
                    "cannot be computed",
                    "set output_router_logits=False in the config of the model",
                )

        return watch

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context for the forward pass of one microbatch."""
        self._taken.clear()
        self._open = True
        added = auxiliary_loss_is_added.set(self.coefficient > 0)
        try:
            yield
        finally:
            self._open = False
            auxiliary_loss_is_added.reset(added)

    def take(self, counted: Tensor, weights: Tensor | None = None) -> Tensor | None:
        """The weighted sum over rows of what the routers add, and note the figures; None if that is nothing.

        Args:
            counted: Which positions count, bool `[rows, positions]`, or `[rows]` for whole rows.
            weights: Of each row `[rows]`; None: its number of tokens that count.

        Returns:
            Sum over routers and rows, the coefficient included: float32 scalar.
        """
        taken, self._taken = self._taken, []
        if not torch.is_grad_enabled():
            return None
        # A loss may have run the model before without gradients, to find out what it returns.
        with_gradient = {number for number, logits, _ in taken if logits.requires_grad}
        total: Tensor | None = None
        for number, logits, chosen in taken:
            if number in with_gradient and not logits.requires_grad:
                continue
            if self.coefficient and number not in with_gradient:
                _check_is_frozen(self._routers[number])
            where, groups = self._parts.find(counted, len(logits))
            if where is None:
                if self.coefficient or self._moves_biases:
                    raise _without_labels(counted, len(logits), bias=not self.coefficient)
                continue
            sigmoid = self.shapes[number].sigmoid
            balance = row_balance(logits, chosen, where, sigmoid=sigmoid, groups=groups)
            each = balance.tokens if weights is None else weights
            added = (balance.loss * each).sum()
            self._note(number, balance, added.detach(), where, each)
            if self.coefficient:
                scaled = added * (self.coefficient * self.scale(number))
                total = scaled if total is None else total + scaled
        return total

    def _note(
        self, number: int, balance: RowBalance, added: Tensor, counted: Tensor, weights: Tensor
    ) -> None:
        scalars = torch.stack([added, weights.sum().to(added), balance.entropy, counted.sum().to(added)])
        self._sums.setdefault(number, []).append(torch.cat([scalars, balance.load]))

    def take_sums(self) -> dict[int, Tensor]:
        """By router, what was noted since the last call, float64 or the widest that the device has.

        Weighted sum of the balance of rows, sum of the weights, sum of entropies, tokens that count, and then
        the tokens of each expert.
        """
        sums, self._sums = self._sums, {}
        return {
            number: torch.stack(noted).to(widest(noted[0].device)).sum(dim=0)
            for number, noted in sums.items()
        }


def widest(device: torch.device) -> torch.dtype:
    """The dtype that sums of many figures are held in: float64 where a device is known to have it."""
    return torch.float64 if device.type in ("cpu", "cuda", "meta") else torch.float32


def _by_position(counted: Tensor, tokens: int) -> Tensor | None:
    """Which tokens count, [rows, positions]; None if the labels do not tell."""
    if counted.ndim == 1 and len(counted) and tokens % len(counted) == 0:
        return counted.unsqueeze(-1).expand(len(counted), tokens // len(counted))
    return counted if counted.ndim == 2 and counted.numel() == tokens else None


def _without_labels(counted: Tensor, tokens: int, *, bias: bool) -> ConfigurationError:
    return ConfigurationError(
        "router_bias_update_rate" if bias else "output_router_logits",
        "above 0" if bias else True,
        f"needs a label for each of the {tokens} tokens that a router has seen, but the labels are "
        f"{list(counted.shape)}",
        f"set it to {0 if bias else False} in the config of the model",
    )


def _check_is_frozen(router: nn.Module) -> None:
    """Refuse a router that is trained and has seen tokens where no gradient passes."""
    if isinstance(router.weight, Tensor) and router.weight.requires_grad:
        raise ConfigurationError(
            "gradient_checkpointing_kwargs",
            {"use_reentrant": True},
            f"hides {type(router).__name__} from the backward pass: its balance loss would have no gradient",
            "set activation_checkpointing='full' in the arguments of the trainer instead",
        )


class RoutedLoss:
    """A loss of labels with what the routers add.

    Its value stays that of the loss alone: what is added enters the gradient, and has log entries of its own.

    Args:
        loss: The loss.
        routers: The routers.
    """

    def __init__(self, loss: TokenLoss, routers: RouterLosses) -> None:
        self.loss = loss
        self.routers = routers

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count, from labels."""
        return self.loss.count(labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """Run the model, and watch its routers."""
        with self.routers.watching():
            return predict(self.loss, model, inputs, labels)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses; its gradient has that of the routers."""
        return _with_gradient_of(self.loss(predictions, labels), self.added(labels))

    def added(self, labels: Tensor) -> Tensor | None:
        """What the routers add for the microbatch that was watched last."""
        rows = [self.loss.count(row.unsqueeze(0)) for row in labels]
        return self.routers.take(~is_ignored(labels), torch.stack(rows).float())


class RoutedTargets(OnTargets):
    """The same for a loss that is given targets.

    Args:
        loss: What `OnTargets` is made of.
        routers: The routers.
    """

    def __init__(self, loss: OnTargets, routers: RouterLosses) -> None:
        super().__init__(loss.loss)
        self.routers = routers

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> object:
        """Run the model, and watch its routers."""
        with self.routers.watching():
            return super().predict(model, inputs, labels)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses of targets; its gradient has that of the routers."""
        return _with_gradient_of(super().__call__(predictions, labels), self.added(labels))

    def added(self, labels: Tensor) -> Tensor | None:
        """What the routers add for the microbatch that was watched last."""
        counted = ~is_ignored(labels)
        return self.routers.take(counted, counted.float() if counted.ndim == 1 else None)


def with_router_loss(
    loss: TokenLoss, compute: Callable[[], Tensor], labels: Tensor, divisor: Tensor | float
) -> Tensor:
    """Compute a part of a model that has no loss, such as a stage, so that its routers add theirs.

    Args:
        loss: The loss of the run.
        compute: Returns what the part hands on.
        labels: Of the microbatch, as the loss is given them.
        divisor: What the loss is divided by before the backward pass, here as well.

    Returns:
        What `compute` returns; going back through it adds the gradient of the routers.
    """
    if not isinstance(loss, RoutedLoss | RoutedTargets):
        return compute()
    with loss.routers.watching():
        output = compute()
    added = loss.added(labels)
    if added is None:
        return output
    return _Carry.apply(output, added / divisor)


def _with_gradient_of(total: Tensor, added: Tensor | None) -> Tensor:
    # The difference is 0, so that the value stays as it is to the last bit.
    return total if added is None else total + (added - added.detach())


class _Carry(torch.autograd.Function):
    """Hands a tensor on, and gives another scalar a gradient of 1 on the way back."""

    if TYPE_CHECKING:
        apply: ClassVar[Callable[[Tensor, Tensor], Tensor]]  # torch's has no types

    @staticmethod
    def forward(ctx: object, output: Tensor, added: Tensor) -> Tensor:
        # Not a view: schedules that split the backward pass detach outputs of stages in place (torch 2.13).
        return output.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=torch.float32, device=gradient.device)
