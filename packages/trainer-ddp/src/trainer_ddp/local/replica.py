"""What a rank has of its own while ranks train by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor

from dist_env import get_logger

from .combining import Key, RankCombiner
from .moments import Entry, Moments
from .tensors import check_names, host_copy, put_back
from .weights import Weights

logger = get_logger(__name__)


class Replica:
    """This rank's weights and optimizer state, which may differ from those of other ranks.

    As a state component it is what `consolidated` sets aside, so that the checkpoint beside it can be an
    ordinary one of the means, and yet the same ranks go on exactly. Other numbers of ranks go on from the
    means.

    Args:
        weights: What is trained.
        moments: The state of the optimizer; none if nothing trains.
        ranks: The ranks.
    """

    def __init__(self, weights: Weights, moments: Moments | None, ranks: RankCombiner) -> None:
        self.weights_differ = False
        """Whether weights may differ between ranks, outside of `consolidated`."""
        self.moments_differ = False
        """Whether optimizer state may."""
        self._weights = weights
        self._moments = moments
        self._ranks = ranks
        self._own_weights: dict[str, Tensor] | None = None
        self._own_moments: dict[str, object] | None = None

    @property
    def shows_mean_weights(self) -> bool:
        """Whether the model holds the mean just now."""
        return self._own_weights is not None

    @property
    def shows_mean_moments(self) -> bool:
        """Whether the optimizer holds the mean just now."""
        return self._own_moments is not None

    def note_local_step(self) -> None:
        """Note that each rank has stepped by itself."""
        self.weights_differ = self.moments_differ = True

    def settle_weights(self) -> None:
        """Replace the weights by their means; collective."""
        _assign(self._ranks, self._weights.all())
        self.weights_differ = False

    def settle_buffers(self) -> None:
        """Replace the buffers by what all ranks make of them; collective."""
        _assign(self._ranks, self._weights.buffers())

    def settle_moments(self) -> None:
        """Replace the state of the optimizer by its means; collective."""
        if self._moments is not None:
            uniform = self._moments.uniform(self._ranks)
            self._moments.take_out_others(uniform)
            _assign(self._ranks, self._moments.leaves(uniform))
        self.moments_differ = False

    @contextmanager
    def consolidated(self, *, optimizer: bool) -> Iterator[None]:
        """A context in which weights and, if asked, optimizer state are the means; collective.

        Afterwards each rank has its own again, bit for bit; changes that were made inside are gone.

        Args:
            optimizer: Whether the state of the optimizer is wanted too.
        """
        with ExitStack() as stack:
            if self.weights_differ and not self.shows_mean_weights:
                stack.enter_context(self._mean_weights())
            wanted = optimizer and self.moments_differ and not self.shows_mean_moments
            if wanted and self._moments is not None:
                stack.enter_context(self._mean_moments(self._moments))
            yield

    def state_dict(self) -> dict[str, object]:
        """What this rank has of its own: nothing where nothing differs."""
        state: dict[str, object] = {}
        if self.weights_differ:
            state["weights"] = self._own_weights or self._weights.all()
        if self.moments_differ and self._moments is not None:
            state["moments"] = self._own_moments or self._moments.state(lambda tensor: tensor)
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Put back what the rank of this number had.

        Without an optimizer nothing is trained, and the mean, which is in the model by then, stays.

        Raises:
            checkpoint_core.CheckpointError: If it does not fit model or optimizer.
        """
        if self._moments is None:
            return
        weights = cast("Mapping[str, Tensor] | None", state.get("weights"))
        moments = cast("Mapping[str, object] | None", state.get("moments"))
        if weights is not None:
            live = self._weights.all()
            check_names("what a rank had of its own", weights, live)
            put_back([(live[name], value) for name, value in weights.items()])
        if moments is not None:
            self._moments.load(moments)
        self.weights_differ, self.moments_differ = weights is not None, moments is not None

    def load_resharded(self, states: Sequence[dict[str, object]], *, rank: int, world_size: int) -> None:
        """Leave model and optimizer as they are: with the means.

        Args:
            states: What each rank had of its own.
            rank: This rank.
            world_size: Number of ranks now.
        """
        self.weights_differ = self.moments_differ = False
        if any(states):
            logger.info(
                "saved by %d ranks that trained by themselves, loaded by %d: all ranks go on from the means",
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
    def _mean_moments(self, moments: Moments) -> Iterator[None]:
        tensors = {id(tensor): tensor for tensor in moments.leaves(moments.live()).values()}
        copies = {number: host_copy(tensor) for number, tensor in tensors.items()}
        self._own_moments = moments.state(lambda tensor: copies.get(id(tensor), tensor))
        left_out: list[Entry] = []
        try:
            uniform = moments.uniform(self._ranks)
            left_out = moments.take_out_others(uniform)
            _assign(self._ranks, moments.leaves(uniform))
            yield
        finally:
            moments.put_in(left_out)
            put_back([(tensor, copies[number]) for number, tensor in tensors.items()])
            self._own_moments = None


@torch.no_grad()
def _assign(ranks: RankCombiner, tensors: Mapping[Key, Tensor]) -> None:
    for combined in ranks.combine(tensors):
        for key, value in combined.items():
            tensors[key].copy_(value)
