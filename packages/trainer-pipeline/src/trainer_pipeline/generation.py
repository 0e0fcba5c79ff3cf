"""All ranks call the model alike, and each computes its blocks in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .blocks import BlockRow, BlockStage, StandIn, hidden_in, with_hidden
from .idle import idle
from .layout import Layout
from .relay import Relay


@runtime_checkable
class _Cache(Protocol):
    """A key-value cache of Hugging Face."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> object:
        """Add the keys and values of some positions to a layer."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that a layer holds."""


class Elsewhere(StandIn):
    """A block of another rank."""

    def __init__(self, block: nn.Module, row: BlockRow, place: int) -> None:
        super().__init__(block)
        self._row = row
        self._place = place

    def forward(self, *args: object, **kwargs: object) -> object:
        """The hidden state as it is, since another one takes its place where it matters."""
        hidden = hidden_in(self.block, args, kwargs)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, _Cache):
            # The model asks the first layer how many positions it has seen: let all layers know, in keys
            # and values of one number for each position.
            seen = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
            cache.update(seen, seen, self._place)
        return self._row.like_a_block(hidden)


class Here(StandIn):
    """A block of this rank, at whose ends hidden states come and go.

    Args:
        block: The block.
        relay: Brings and takes hidden states.
        begins: The stage whose first block it is; none if it is not one that something comes for.
        ends: The stage whose last block it is; none if it is not one that something goes on from.
    """

    def __init__(self, block: nn.Module, relay: Relay, begins: int | None, ends: int | None) -> None:
        super().__init__(block)
        self._relay = relay
        self._begins = begins
        self._ends = ends

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the block returns."""
        if self._begins is not None:
            args, kwargs = with_hidden(self.block, self._relay.receive(self._begins), args, kwargs)
        output: object = self.block(*args, **kwargs)
        if self._ends is not None:
            hidden = output if isinstance(output, Tensor) else _first(output)
            self._relay.send(hidden, self._ends + 1)
        return output


def _first(output: object) -> Tensor:
    found = output[0] if isinstance(output, Sequence) and output else None
    if not isinstance(found, Tensor):
        raise TypeError(f"a block returned a {type(output).__name__}, in which the hidden state is not first")
    return found


@contextmanager
def in_turn(
    model: nn.Module,
    stages: Sequence[BlockStage],
    spans: Sequence[range],
    layout: Layout,
    rank: int,
    relay: Relay,
) -> Iterator[None]:
    """A context in which all ranks may call the model alike: each computes the blocks that it has.

    What comes after the blocks is computed by the rank that has it; the others return something of the same
    shape, into which `logits_of_one_rank` puts the logits.

    Args:
        model: The model.
        stages: Those of this rank.
        spans: The blocks of each stage.
        layout: Which rank has which stage.
        rank: This rank, in the pipeline.
        relay: Brings and takes hidden states.
    """
    standing: list[nn.Module] = []
    row = stages[0].row
    last = layout.num_stages - 1
    for stage, span in enumerate(spans):
        for place in span:
            block = row.blocks[place]
            if layout.rank_of(stage) != rank:
                standing.append(Elsewhere(block, row, place))
                continue
            begins = stage if place == span.start and stage > 0 else None
            ends = stage if place == span.stop - 1 and stage < last else None
            standing.append(Here(block, relay, begins, ends))

    before, after = stages[0].around
    unused = [*(before if not any(stage.is_first for stage in stages) else ())]
    unused += after if not any(stage.is_last for stage in stages) else ()
    with torch.no_grad(), row.standing(standing), idle(unused), _inside(model, stages, relay):
        yield


@contextmanager
def _inside(model: nn.Module, stages: Sequence[BlockStage], relay: Relay) -> Iterator[None]:
    """A context in which a call of the model is a call of the stages, for what hangs on them as modules."""
    forward = model.forward
    overridden = vars(model).get("forward")

    @wraps(forward)
    def through_stages(*args: object, **kwargs: object) -> object:
        call = partial(forward, *args, **kwargs)
        for stage in stages:
            stage.instead = call
            call = partial(stage, None)
        try:
            return call()
        finally:
            for stage in stages:
                stage.instead = None
            relay.settle()

    model.forward = through_stages
    try:
        yield
    finally:
        del model.forward
        if overridden is not None:
            model.forward = overridden
