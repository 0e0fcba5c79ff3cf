"""The same logits and random numbers on all ranks, so that all write the same text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from checkpoint_core import RNGState
from dist_env import DistributedEnvInterface, broadcast_object

from .errors import ConfigurationError


def share_generators(env: DistributedEnvInterface) -> None:
    """Put the random generators of all ranks into the state of the first; collective.

    Args:
        env: Rank and world size of this process.
    """
    generators = RNGState()
    generators.load_state_dict(broadcast_object(generators.state_dict(), env))


@contextmanager
def generators_of_rank_0(env: DistributedEnvInterface) -> Iterator[None]:
    """A context in which all ranks have the random generators of the first; collective at entry.

    They differ otherwise where only rank 0 reads data, or each rank has a seed of its own. Afterwards each
    rank has its own again.

    Args:
        env: Rank and world size of this process.
    """
    own = RNGState()
    before = own.state_dict()
    share_generators(env)
    try:
        yield
    finally:
        own.load_state_dict(before)


@contextmanager
def logits_of_one_rank(model: nn.Module, group: ProcessGroup | None, source: int = 0) -> Iterator[None]:
    """A context in which every call of a model gives all ranks the logits of one of them; collective.

    Without it a difference in the last bit could end a text on one rank only, and the others would wait for
    it at the next layer.

    Args:
        model: The model, called without gradients. It returns logits, or something that holds them as
            `logits`, as an attribute or under that key, or first.
        group: The ranks; none for one rank.
        source: Whose logits; its number in the group.

    Raises:
        ConfigurationError: At a call, if no logits are found in what the model returns.
    """

    def overwrite(module: nn.Module, args: object, output: object) -> None:
        if group is None:
            return
        logits = _logits(output)
        same = logits.detach().contiguous()
        dist.broadcast(same, src=dist.get_global_rank(group, source), group=group)
        logits.detach().copy_(same)

    handle = model.register_forward_hook(overwrite)
    try:
        yield
    finally:
        handle.remove()


def _logits(output: object) -> Tensor:
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    else:
        output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise ConfigurationError(
            "model",
            type(output).__name__,
            "returns no logits that the ranks could write the same text from",
            "return a tensor, or something that has one as `logits`",
        )
    return output
