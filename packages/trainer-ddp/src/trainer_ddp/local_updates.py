"""When ranks train by themselves and when they come together, and what each has of its own until then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from checkpoint_core import ModelState, SharingPattern, StateComponent
from dist_env import get_logger
from trainer_core import CommBytes, ConfigurationError

from .arguments import DiLoCoArguments, PostLocalSGDArguments
from .combining import Key, RankCombiner
from .optimizer_state import (
    Entry,
    NamedOptimizerState,
    check_names,
    host_copy,
    put_back,
    table_of,
    tensors_of,
)
from .outer_optimizer import OuterOptimizer

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
        traffic: CommBytes,
    ) -> None:
        self._start, self._period = _phases(settings)
        self._step = 0
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._ranks = RankCombiner(process_group, device, traffic)
        self._weights = Weights(model, optimizer)
        optimizer_state = None if optimizer is None else NamedOptimizerState(optimizer, model)
        self._replica = Replica(self._weights, optimizer_state, self._ranks)
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
        """Whether weights may differ between ranks now; not inside of `synced_weights`."""
        return self._replica.weights_differ and not self._replica.shows_mean_weights

    @property
    def optimizer_state_differs(self) -> bool:
        """Whether optimizer state may differ between ranks now; not where `synced_weights` shows the mean."""
        return self._replica.optimizer_state_differs and not self._replica.shows_mean_optimizer_state

    def begin(self, step: int) -> None:
        """Note that training begins, or continues; collective, after a checkpoint was loaded.

        Where the settings have changed so that ranks now step together, differences between them would
        stay for good: they continue from the means.

        Args:
            step: How many optimizer steps are done.
        """
        self._step = step
        together = step < self._start or self._never_apart
        if together and (self._replica.weights_differ or self._replica.optimizer_state_differs):
            logger.info(
                "at step %d the settings let all ranks step together: they begin from the means", step
            )
            self._replica.settle_weights()
            self._replica.settle_optimizer_state()
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

    def synced_weights(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """A context in which all ranks hold the means over the ranks; collective.

        The means are those of the trained parameters and of buffers that are saved; buffers that are not
        floating-point are as on the first rank. Optimizer state that not all ranks have in the same form is
        left out. Afterwards each rank has its own again, bit for bit: changes made inside are gone. Where
        nothing differs, nothing happens; so the buffers of ranks that step together are the caller's affair.

        Args:
            optimizer: Whether the state of the optimizer is wanted too.
        """
        return self._replica.synced_weights(optimizer=optimizer)

    def state_components(self) -> Sequence[StateComponent]:
        """What has to be saved, inside of `synced_weights(optimizer=True)`, to continue exactly.

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
                f"post_local_sgd.{name}",
                None,
                "must be set with post_local_sgd.enabled",
                "give a number, such as 100",
            )
    return settings.start_step or 0, settings.period or 1


class Replica:
    """This rank's weights and optimizer state, which may differ from those of other ranks.

    As a state component it is what `synced_weights` sets aside, so that the checkpoint beside it can be an
    ordinary one of the means, and yet the same ranks continue exactly. Other numbers of ranks continue from
    the means.

    Args:
        weights: What is trained.
        optimizer_state: The state of the optimizer; none if nothing trains.
        ranks: The ranks.
    """

    def __init__(
        self, weights: Weights, optimizer_state: NamedOptimizerState | None, ranks: RankCombiner
    ) -> None:
        self.weights_differ = False
        """Whether weights may differ between ranks, outside of `synced_weights`."""
        self.optimizer_state_differs = False
        """Whether optimizer state may."""
        self._weights = weights
        self._optimizer_state = optimizer_state
        self._ranks = ranks
        self._own_weights: dict[str, Tensor] | None = None
        self._own_optimizer_state: dict[str, object] | None = None

    @property
    def shows_mean_weights(self) -> bool:
        """Whether the model holds the mean just now."""
        return self._own_weights is not None

    @property
    def shows_mean_optimizer_state(self) -> bool:
        """Whether the optimizer holds the mean just now."""
        return self._own_optimizer_state is not None

    def note_local_step(self) -> None:
        """Note that each rank has stepped by itself."""
        self.weights_differ = self.optimizer_state_differs = True

    def settle_weights(self) -> None:
        """Replace the weights by their means; collective."""
        _assign(self._ranks, self._weights.all())
        self.weights_differ = False

    def settle_buffers(self) -> None:
        """Replace the buffers by what all ranks make of them; collective."""
        _assign(self._ranks, self._weights.buffers())

    def settle_optimizer_state(self) -> None:
        """Replace the state of the optimizer by its means; collective."""
        if self._optimizer_state is not None:
            uniform = self._optimizer_state.uniform(self._ranks)
            self._optimizer_state.take_out_others(uniform)
            _assign(self._ranks, self._optimizer_state.leaves(uniform))
        self.optimizer_state_differs = False

    @contextmanager
    def synced_weights(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which weights and, if asked, optimizer state are the means; collective.

        Afterwards each rank has its own again, bit for bit; changes that were made inside are gone.

        Args:
            optimizer: Whether the state of the optimizer is wanted too.
        """
        with ExitStack() as stack:
            if self.weights_differ and not self.shows_mean_weights:
                stack.enter_context(self._mean_weights())
            wanted = optimizer and self.optimizer_state_differs and not self.shows_mean_optimizer_state
            if wanted and self._optimizer_state is not None:
                stack.enter_context(self._mean_optimizer_state(self._optimizer_state))
            yield

    def state_dict(self) -> dict[str, object]:
        """What this rank has of its own: nothing where nothing differs."""
        state: dict[str, object] = {}
        if self.weights_differ:
            state["weights"] = self._own_weights or self._weights.all()
        if self.optimizer_state_differs and self._optimizer_state is not None:
            state["moments"] = self._own_optimizer_state or self._optimizer_state.state(lambda tensor: tensor)
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put back what the rank of this number had.

        Without an optimizer nothing is trained, and the mean, which is in the model by then, stays.

        Raises:
            checkpoint_core.CheckpointError: If it does not fit model or optimizer.
        """
        if self._optimizer_state is None:
            return
        saved, optimizer_state = state.get("weights"), state.get("moments")
        if saved is not None:
            live, weights = self._weights.all(), tensors_of("what a rank had of its own", saved)
            check_names("what a rank had of its own", weights, live)
            put_back([(live[name], value) for name, value in weights.items()])
        if optimizer_state is not None:
            self._optimizer_state.load(table_of("what a rank had of the optimizer", optimizer_state))
        self.weights_differ, self.optimizer_state_differs = saved is not None, optimizer_state is not None

    def load_resharded(self, states: Sequence[dict[str, object]], *, rank: int, world_size: int) -> None:
        """Leave model and optimizer as they are: with the means.

        Args:
            states: What each rank had of its own.
            rank: This rank.
            world_size: Number of ranks now.
        """
        self.weights_differ = self.optimizer_state_differs = False
        if any(states):
            logger.info(
                "saved by %d ranks that trained by themselves, loaded by %d: all ranks continue from the "
                "means",
                len(states),
                world_size,
            )

    @contextmanager
    def _mean_weights(self) -> Iterator[None]:
        live = self._weights.all()
        self._own_weights = {name: host_copy(tensor) for name, tensor in live.items()}
        copies = [(live[name], copy) for name, copy in self._own_weights.items()]
        try:
            _assign(self._ranks, live)
            yield
        finally:
            put_back(copies)
            self._own_weights = None

    @contextmanager
    def _mean_optimizer_state(self, optimizer_state: NamedOptimizerState) -> Iterator[None]:
        tensors = {id(tensor): tensor for tensor in optimizer_state.leaves(optimizer_state.live()).values()}
        copies = {number: host_copy(tensor) for number, tensor in tensors.items()}
        self._own_optimizer_state = optimizer_state.state(lambda tensor: copies.get(id(tensor), tensor))
        left_out: list[Entry] = []
        try:
            uniform = optimizer_state.uniform(self._ranks)
            left_out = optimizer_state.take_out_others(uniform)
            _assign(self._ranks, optimizer_state.leaves(uniform))
            yield
        finally:
            optimizer_state.put_in(left_out)
            put_back([(tensor, copies[number]) for number, tensor in tensors.items()])
            self._own_optimizer_state = None


@torch.no_grad()
def _assign(ranks: RankCombiner, tensors: Mapping[Key, Tensor]) -> None:
    for combined in ranks.combine(tensors):
        for key, value in combined.items():
            tensors[key].copy_(value)


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
