"""Write texts with a model whose blocks are on several ranks: all call it alike, each computes its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError, Sampling

from .blocks import BlockRow, BlockStage, StandIn, hidden_in, with_hidden
from .param_pruning import idle
from .schedules import StageLayout
from .stage_forward import ActivationChannel

Step = Callable[[Tensor, Tensor], Tensor]
"""`(the text so far, what is new of it) -> logits`, those of the last position come last."""


def write_on(
    model: nn.Module,
    input_ids: Tensor,
    sampling: Sampling,
    *,
    max_new_tokens: int,
    eos_token_id: int | None,
    pad_token_id: int | None,
    use_cache: bool,
) -> Tensor:
    """Continue texts; all ranks that the model is on do so together.

    Args:
        model: The model, in evaluation mode.
        input_ids: int64 [rows, positions].
        sampling: How tokens are chosen.
        max_new_tokens: Most tokens to add.
        eos_token_id: Ends a row; it is kept.
        pad_token_id: What fills a row up behind its end; eos_token_id otherwise.
        use_cache: Keep keys and values, if the model takes a cache.

    Returns:
        int64 [rows, positions + new].

    Raises:
        ConfigurationError: If there is no prompt, or a negative number of tokens is asked for.
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ConfigurationError(
            "input_ids",
            tuple(input_ids.shape),
            "must be [rows, positions], both 1 or more",
            "give a prompt of at least one token",
        )
    if max_new_tokens < 0:
        raise ConfigurationError("max_new_tokens", max_new_tokens, "must be 0 or more", "set it to 0 or more")
    step = _step(model, input_ids, max_new_tokens) if use_cache else _recomputed(model)
    text, new = input_ids, input_ids
    ended = torch.zeros(len(text), dtype=torch.bool, device=text.device)
    filler = eos_token_id if pad_token_id is None else pad_token_id
    for _ in range(max_new_tokens):
        token = sampling.choose(step(text, new)[:, -1], text)
        if eos_token_id is not None:
            token = torch.where(ended, filler, token) if filler is not None else token
            ended |= token == eos_token_id
        new = token[:, None]
        text = torch.cat([text, new], dim=1)
        if eos_token_id is not None and bool(ended.all()):
            break
    return text


def _step(model: nn.Module, input_ids: Tensor, max_new_tokens: int) -> Step:
    taken = inspect.signature(model.forward).parameters
    if "past_key_values" in taken and "use_cache" in taken:
        return _CachedByTheModel(model)
    make = getattr(model, "make_cache", None)
    if callable(make) and "cache" in taken:
        cache = make(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)
        return lambda text, new: _logits(model(input_ids=new, cache=cache))
    return _recomputed(model)


def _recomputed(model: nn.Module) -> Step:
    return lambda text, new: _logits(model(input_ids=text))


class _CachedByTheModel:
    """Hands the cache that a model of Hugging Face returns back to it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._cache: object = None

    def __call__(self, text: Tensor, new: Tensor) -> Tensor:
        output = self._model(input_ids=new, past_key_values=self._cache, use_cache=True)
        self._cache = output.past_key_values
        return _logits(output)


def _logits(output: object) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"The model must return logits to write text, and returned a {type(output).__name__}. Return a "
            "tensor, or an object with a field `logits`."
        )
    return logits


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
        channel: Brings and takes hidden states.
        begins: The stage whose first block it is; none if it is not one that something comes for.
        ends: The stage whose last block it is; none if it is not one that something continues from.
    """

    def __init__(
        self, block: nn.Module, channel: ActivationChannel, begins: int | None, ends: int | None
    ) -> None:
        super().__init__(block)
        self._channel = channel
        self._begins = begins
        self._ends = ends

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the block returns."""
        if self._begins is not None:
            args, kwargs = with_hidden(self.block, self._channel.receive(self._begins), args, kwargs)
        output: object = self.block(*args, **kwargs)
        if self._ends is not None:
            hidden = output if isinstance(output, Tensor) else _first(output)
            self._channel.send(hidden, self._ends + 1)
        return output


def _first(output: object) -> Tensor:
    found = output[0] if isinstance(output, Sequence) and output else None
    if not isinstance(found, Tensor):
        raise TypeError(
            f"a block returned a {type(output).__name__}, in which the hidden state is not first."
        )
    return found


@contextmanager
def in_turn(
    model: nn.Module,
    stages: Sequence[BlockStage],
    spans: Sequence[range],
    layout: StageLayout,
    rank: int,
    channel: ActivationChannel,
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
        channel: Brings and takes hidden states.
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
            standing.append(Here(block, channel, begins, ends))

    before, after = stages[0].around
    unused = [*(before if not any(stage.is_first for stage in stages) else ())]
    unused += after if not any(stage.is_last for stage in stages) else ()
    with torch.no_grad(), row.standing(standing), idle(unused), _inside(model, stages, channel):
        yield


@contextmanager
def _inside(model: nn.Module, stages: Sequence[BlockStage], channel: ActivationChannel) -> Iterator[None]:
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
            channel.wait()

    model.forward = through_stages
    try:
        yield
    finally:
        del model.forward
        if overridden is not None:
            model.forward = overridden
