"""Routers of experts in a run: their loss is added, their biases are moved, and their figures are logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_env import get_logger

from ..errors import ConfigurationError
from ..loss import (
    OnTargets,
    RoutedLoss,
    RoutedTargets,
    RouterLosses,
    RowParts,
    TokenLoss,
    is_router,
    router_shape,
    widest,
)
from .transforms import BuiltModel, StepHooks

logger = get_logger(__name__)

MOST_LISTED = 1024
"""Experts of all layers, up to which the load of each is in every log entry."""
_SCALARS = 4
"""Figures of a router before the tokens of its experts."""


def with_routers(built: BuiltModel, loss: TokenLoss, *, sees_outputs: bool) -> TokenLoss:
    """The loss of a run with what the routers of the model add, if it has any.

    What the config of the model says decides: `output_router_logits` whether their balance loss is added,
    `router_aux_loss_coef` its weight, `router_bias_update_rate` how far biases move in a step.

    Args:
        built: The model; it gets a hook.
        loss: As the trainer calls it.
        sees_outputs: Whether the user's loss is given all that the model returns, and so adds what it wants.

    Raises:
        ConfigurationError: If biases are to be moved that no router has.
    """
    every = {
        name: module
        for name, module in built.meta_model.named_modules()
        # PEFT keeps the module that another one stands for.
        if is_router(module) and "original_module" not in name.split(".")
    }
    if not every:
        return loss
    numbers = {name: number for number, name in enumerate(every)}
    held = {id(module) for part in built.parts for module in part.modules()}
    routers = {
        numbers[name]: module
        for name, module in built.model.named_modules()
        if name in numbers and id(module) in held and _is_here(module)
    }
    config = getattr(built.meta_model, "config", None)
    wanted = getattr(config, "output_router_logits", False) is True
    coefficient = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0) if wanted else 0.0
    rate = float(getattr(config, "router_bias_update_rate", 0.0) or 0.0)
    if rate and all(getattr(each, "e_score_correction_bias", None) is None for each in every.values()):
        raise ConfigurationError(
            "router_bias_update_rate",
            rate,
            "moves the biases of routers, but no router of this model has an e_score_correction_bias",
            "leave it out of the config",
        )
    if coefficient and sees_outputs:
        logger.info(
            "the balance loss of routers is left to compute_loss_func, which sees what the model returns"
        )
        coefficient = 0.0
    meshes, parts = built.ranks.meshes, RowParts()
    if meshes is not None:
        parts = RowParts(
            meshes.context.get_group() if built.ranks.layout.context > 1 else None,
            meshes.tensor.get_group() if built.layers_divide_sequences else None,
        )
    shapes = [router_shape(each) for each in every.values()]
    losses = RouterLosses(routers, shapes, coefficient, parts, moves_biases=rate > 0)
    built.balances_routers = coefficient > 0
    built.hooks.append(RouterHooks(built, losses, routers, rate, list(every)))
    if isinstance(loss, OnTargets):
        return RoutedTargets(loss, losses)
    return RoutedLoss(loss, losses)


def _is_here(router: nn.Module) -> bool:
    """Whether this rank computes a router; of one that another stage has it holds no weight."""
    return router._parameters.get("weight") is not None


class RouterHooks(StepHooks):
    """Moves the biases of routers after each step, and keeps what is logged about them.

    A bias goes up by the rate where all ranks and microbatches of the step have sent an expert fewer tokens
    than the mean, and down where they have sent it more (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Args:
        built: What this rank holds.
        losses: Counts the tokens.
        routers: Those of this rank, by their numbers in the whole model.
        rate: How far a bias moves.
        names: Of all routers of the whole model.
    """

    def __init__(
        self,
        built: BuiltModel,
        losses: RouterLosses,
        routers: Mapping[int, nn.Module],
        rate: float,
        names: Sequence[str],
    ) -> None:
        self._names = names
        self._ranks = built.ranks
        self._losses = losses
        # In an order that the ranks of a group share.
        self._biased = sorted(
            number
            for number, router in routers.items()
            if rate and getattr(router, "e_score_correction_bias", None) is not None
        )
        self._routers = routers
        self._rate = rate
        self._window: dict[int, Tensor] = {}

    def begin(self, step: int) -> None:
        """Forget a step that was left in the middle."""
        self._losses.take_sums()
        self._window.clear()

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move the biases; collective among the ranks that have the same layers and other data."""
        figures = self._losses.take_sums()
        for number, noted in figures.items():
            before = self._window.get(number)
            self._window[number] = noted if before is None else before + noted
        numbers = self._biased
        if not numbers:
            return
        loads = torch.cat([self._load(figures, number) for number in numbers])
        if self._ranks.data_group is not None:
            dist.all_reduce(loads, group=self._ranks.data_group)
        parts = torch.split(loads, [self._losses.shapes[number].experts for number in numbers])
        for number, load in zip(numbers, parts, strict=True):
            bias = self._bias(number)
            bias.add_(torch.sign(load.mean() - load).to(bias), alpha=self._rate)

    def _bias(self, number: int) -> Tensor:
        # Asked for anew: moving or casting a model gives it other buffers.
        bias = self._routers[number].e_score_correction_bias
        if not isinstance(bias, Tensor):
            raise TypeError("the bias of a router is a tensor: that was checked before.")
        return bias

    def _load(self, figures: Mapping[int, Tensor], number: int) -> Tensor:
        noted = figures.get(number)
        if noted is None:
            experts = self._losses.shapes[number].experts
            return torch.zeros(experts, dtype=widest(self._ranks.device), device=self._ranks.device)
        return noted[_SCALARS:]

    def log_entries(self) -> Mapping[str, object]:
        """Balance loss, entropy and the fullest expert since the last call; collective.

        `aux_loss` is the loss of the routers as `RouterLosses.scale` has it, `aux_loss_weighted` the same
        times the coefficient, as it enters the gradient. `router_entropy` is the mean over tokens and layers,
        in nats. `expert_load` is what each expert was sent, over the mean of its layer, by the names of
        routers; `expert_load_max` and `expert_load_min` are those of the fullest and of the emptiest one.
        Tokens are never dropped, and have no entry.
        """
        window, self._window = self._window, {}
        shapes = self._losses.shapes
        table = torch.zeros(
            len(shapes), _SCALARS + max(shape.experts for shape in shapes), dtype=torch.float64
        )
        for number, noted in window.items():
            table[number, : len(noted)] = noted.double().cpu()
        # By the hosts, over all ranks: those with the same data count it as often in every quotient below.
        sums = self._ranks.sum(table, counts=True)
        balance, weights, entropy, tokens = sums[:, :_SCALARS].unbind(dim=1)
        seen = [number for number in range(len(shapes)) if tokens[number] > 0]
        if not seen:
            return {}
        means = balance / weights.clamp(min=1e-12)
        loss = sum(self._losses.scale(number) * float(means[number]) for number in seen)
        loads = [sums[number, _SCALARS:][: shapes[number].experts] for number in seen]
        loads = [load / load.mean() for load in loads]
        entries: dict[str, object] = {
            "aux_loss": loss,
            "router_entropy": float((entropy[seen] / tokens[seen]).mean()),
            "expert_load_max": max(float(load.max()) for load in loads),
            "expert_load_min": min(float(load.min()) for load in loads),
        }
        if sum(shape.experts for shape in shapes) <= MOST_LISTED:
            entries["expert_load"] = {
                self._names[number]: [round(each, 3) for each in load.tolist()]
                for number, load in zip(seen, loads, strict=True)
            }
        if self._losses.coefficient:
            entries["aux_loss_weighted"] = loss * self._losses.coefficient
        return entries
