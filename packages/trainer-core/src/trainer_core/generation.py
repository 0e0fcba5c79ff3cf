"""Generation of text: the same logits and random numbers on all ranks, and the choice of the next token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
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
            "returns no logits, which every rank needs to write the same text",
            "return a tensor, or an object with the attribute logits",
        )
    return output


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int | None = None
    """Draw from so many most probable tokens only; none: from all."""
    top_p: float | None = None
    """Draw from the fewest most probable tokens whose probabilities sum to this or more (Holtzman et al.
    2020); applied after `top_k`; none: from all."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that are in the text already, and multiplies negative ones (Keskar et
    al. 2019); 1: leaves them."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(
                "temperature", self.temperature, "must be 0 or more", "use 0 for the most probable token"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigurationError(
                "top_k", self.top_k, "must be 1 or more", "leave it out to draw from all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(
                "top_p", self.top_p, "must be above 0 and at most 1", "leave it out to draw from all tokens"
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigurationError(
                "repetition_penalty", self.repetition_penalty, "must be above 0", "use 1 for no penalty"
            )

    def choose(
        self, logits: Tensor, seen: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Choose one token per row.

        Args:
            logits: [rows, vocabulary], any floating dtype.
            seen: int64 [rows, positions], the text so far, for `repetition_penalty`.
            generator: Source of randomness, on the device of the logits; torch's default one otherwise.

        Returns:
            int64 [rows].
        """
        scores = logits.float()
        if self.repetition_penalty != 1.0 and seen is not None:
            scores = _penalised(scores, seen, self.repetition_penalty)
        if self.temperature == 0:
            return scores.argmax(dim=-1)
        scores = scores / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            lowest = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < lowest, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        if self.top_p is not None:
            probabilities = _nucleus(probabilities, self.top_p)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _penalised(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    those = scores.gather(-1, seen)
    return scores.scatter(-1, seen, torch.where(those > 0, those / penalty, those * penalty))


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    ordered, order = probabilities.sort(dim=-1, descending=True)
    # A token goes when those before it already reach the share, so the first one always stays.
    surplus = ordered.cumsum(dim=-1) - ordered >= share
    return probabilities.scatter(-1, order, ordered.masked_fill(surplus, 0.0))
