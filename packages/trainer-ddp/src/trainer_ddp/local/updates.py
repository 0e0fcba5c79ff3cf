"""When ranks train by themselves, and when they come together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from checkpoint_core import SharingPattern, StateComponent
from dist_env import get_logger
from trainer_core import ConfigurationError, Traffic

from ..arguments import DiLoCoArguments, PostLocalSGDArguments
from .combining import RankCombiner
from .moments import Moments
from .outer import OuterOptimizer
from .replica import Replica
from .weights import Weights

logger = get_logger(__name__)


class LocalUpdates:
    """PostLocalSGD and DiLoCo: what is done beside each rank's own optimizer steps.

    Steps are counted from 1, as the trainer counts them. Up to `start_step` gradients are averaged over all
    ranks. After that each rank steps by itself, and after every `period` of such steps the weights of the
    ranks are made one: PostLocalSGD takes their mean, DiLoCo lets an outer optimizer step towards it. What
    the optimizer keeps for each parameter stays each rank's own. Everything follows from the number of the
    step, so a run that is started again is where it was.

    Args:
        settings: Of the mode; it is taken as enabled.
        model: The model, wrapped or not; not wrapped by anything that shards it.
        optimizer: The inner optimizer; none for a run that does not train.
        process_group: All ranks; none for one process.
        node_group: The ranks of this host, for `post_local_gradient_allreduce`; none if there is none.
        traffic: Counts what is sent.

    Raises:
        ConfigurationError: If a setting is missing.
    """

    def __init__(
        self,
        settings: PostLocalSGDArguments | DiLoCoArguments,
        *,
        model: nn.Module,
        optimizer: Optimizer | None,
        process_group: ProcessGroup | None,
        node_group: ProcessGroup | None,
        traffic: Traffic,
    ) -> None:
        self._start, self._period = _phases(settings)
        self._step = 0
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._ranks = RankCombiner(process_group, device, traffic)
        self._weights = Weights(model, optimizer)
        moments = None if optimizer is None else Moments(optimizer, model)
        self._replica = Replica(self._weights, moments, self._ranks)
        self._outer: OuterOptimizer | None = None
        self._together = 1
        if isinstance(settings, DiLoCoArguments):
            self._outer = OuterOptimizer(
                self._weights.parameters, settings.outer_learning_rate, settings.outer_momentum
            )
        elif settings.post_local_gradient_allreduce and node_group is not None:
            self._together = dist.get_world_size(node_group)
            self._warn_if_nothing_is_saved(process_group)

    @property
    def gradient_scope(self) -> Literal["all", "node", "none"]:
        """Which ranks average their gradients in the next step: all, those of this host, or none."""
        if self._step < self._start:
            return "all"
        return "node" if self._together > 1 else "none"

    @property
    def replicas_differ(self) -> bool:
        """Whether weights may differ between ranks now; not inside of `consolidated`."""
        return self._replica.weights_differ and not self._replica.shows_mean_weights

    @property
    def moments_differ(self) -> bool:
        """Whether optimizer state may differ between ranks now; not where `consolidated` shows the mean."""
        return self._replica.moments_differ and not self._replica.shows_mean_moments

    def begin(self, step: int) -> None:
        """Note that training begins, or goes on; collective, after a checkpoint was loaded.

        Where the settings have changed so that ranks now step together, differences between them would
        stay for good: they go on from the means.

        Args:
            step: How many optimizer steps are done.
        """
        self._step = step
        together = step < self._start or self._never_apart
        if together and (self._replica.weights_differ or self._replica.moments_differ):
            logger.info(
                "at step %d the settings let all ranks step together: they begin from the means", step
            )
            self._replica.settle_weights()
            self._replica.settle_moments()
        if self._outer is None:
            return
        if step < self._start:
            self._outer.forget()
        elif not self._outer.anchored:
            if self._replica.weights_differ:
                self._replica.settle_weights()
            self._outer.take_anchor()

    def after_step(self, step: int) -> None:
        """Note that an optimizer step was made, and bring the ranks together if it is time; collective.

        Args:
            step: Its number.
        """
        self._step = step
        local_steps = step - self._start
        if local_steps > 0:
            if not self._never_apart:
                self._replica.note_local_step()
            if local_steps % self._period == 0:
                self._synchronise()
        elif local_steps == 0:
            self._start_apart()

    def consolidated(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """A context in which all ranks hold the means over the ranks; collective.

        The means are those of the trained parameters and of buffers that are saved; buffers that are not
        floating-point are as on the first rank. Optimizer state that not all ranks have in the same form is
        left out. Afterwards each rank has its own again, bit for bit: changes made inside are gone. Where
        nothing differs, nothing happens; so the buffers of ranks that step together are the caller's affair.

        Args:
            optimizer: Whether the state of the optimizer is wanted too.
        """
        return self._replica.consolidated(optimizer=optimizer)

    def state_components(self) -> Sequence[StateComponent]:
        """What has to be saved, inside of `consolidated(optimizer=True)`, to go on exactly.

        To be restored after the model and the optimizer.
        """
        components = [
            StateComponent(key="replica", stateful=self._replica, sharing_pattern=SharingPattern.PER_RANK)
        ]
        if self._outer is not None:
            components.append(
                StateComponent(
                    key="outer",
                    stateful=self._outer,
                    sharing_pattern=SharingPattern.REPLICATED,
                    validate_replication=True,
                )
            )
        return components

    @property
    def _never_apart(self) -> bool:
        """Whether all ranks make the same steps for ever: one rank, or one host that averages gradients."""
        return self._together >= self._ranks.world_size

    def _start_apart(self) -> None:
        if not self._never_apart:
            # Up to here somebody copies buffers around before each forward pass; now ranks keep their own.
            self._replica.settle_buffers()
        if self._outer is not None:
            self._outer.take_anchor()

    def _synchronise(self) -> None:
        if self._outer is not None:
            self._step_outer(self._outer)
        elif self._replica.weights_differ:
            self._replica.settle_weights()

    @torch.no_grad()
    def _step_outer(self, outer: OuterOptimizer) -> None:
        parameters = self._weights.parameters
        for means in self._ranks.combine(parameters):
            for name, value in outer.step(means).items():
                parameters[name].copy_(value)
        self._replica.settle_buffers()
        self._replica.weights_differ = False

    def _warn_if_nothing_is_saved(self, process_group: ProcessGroup | None) -> None:
        if self._ranks.world_size > 1 and self._never_apart and dist.get_rank(process_group) == 0:
            logger.warning(
                "post_local_sgd.post_local_gradient_allreduce=True averages gradients among the %d ranks of "
                "this host, and these are all ranks: every gradient is averaged as in ordinary training, and "
                "nothing is saved. Set it to False to let each rank step by itself",
                self._together,
            )


def _phases(settings: PostLocalSGDArguments | DiLoCoArguments) -> tuple[int, int]:
    """How many steps are made together first, and after how many more ranks come together."""
    if isinstance(settings, DiLoCoArguments):
        return settings.start_step, settings.inner_steps
    for name in ("start_step", "period"):
        if getattr(settings, name) is None:
            raise ConfigurationError(
                f"post_local_sgd.{name}", None, "must be set with post_local_sgd.enabled", "give a number"
            )
    return settings.start_step or 0, settings.period or 1
