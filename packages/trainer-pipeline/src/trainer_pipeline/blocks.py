"""Run some of a model's blocks by the model's own forward.

A model computes something before its blocks (embedding, positions, masks), goes through them in a loop, and
computes something after them. For a part of the blocks the same forward is called, with other modules
standing in the row: they put in the hidden state that came from elsewhere, and take it out where it continues
elsewhere. So nothing of the model is traced or written a second time, and whatever it makes of its inputs
before the blocks, such as the mask of packed documents, every part has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer_core import ConfigurationError

from .param_pruning import idle


class StageEnd(Exception):
    """Carries the hidden state out of a model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the end of a stage was reached")
        self.hidden = hidden


class BlockRow:
    """The blocks of a model in their container.

    Args:
        model: The model.
        path: Qualified name of the container.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        self.path = path
        self._container = model.get_submodule(path)
        self._modules = self._container._modules
        self.names = [name for name, block in self._modules.items() if block is not None]
        self.blocks = [block for block in self._modules.values() if block is not None]
        self.returns: int | None = None
        """How many things a block returns as a tuple, the hidden state first; None if it is that alone."""

    def like_a_block(self, hidden: Tensor) -> object:
        """What a block returns that leaves the hidden state as it is."""
        return hidden if self.returns is None else (hidden, *[None] * (self.returns - 1))

    @contextmanager
    def standing(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """A context in which other modules stand in the row, one for each block."""
        holder = self._container.__dict__
        holder["_modules"] = dict(zip(self._modules, modules, strict=True))
        try:
            yield
        finally:
            holder["_modules"] = self._modules

    def refuse_call(self, model: nn.Module, args: object) -> None:
        """A hook for the model: it cannot be called as it is.

        Raises:
            ConfigurationError: Unless other modules stand in the row.
        """
        if self._container._modules is self._modules:
            raise ConfigurationError(
                "model",
                type(model).__name__,
                "is spread over the ranks of a pipeline, but was called on one of them",
                "call it on all ranks, inside `with trainer.generating():`",
            )


class StandIn(nn.Module):
    """Stands in the row for a block, and has its attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self._held = (block,)  # in a tuple, so that it is not a submodule
        self.training = block.training

    @property
    def block(self) -> nn.Module:
        """The block that it stands for."""
        return self._held[0]

    def __getattr__(self, name: str) -> object:  # type: ignore[override]
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_held"][0], name)


class Passed(StandIn):
    """A block of another stage: lets the hidden state through."""

    def __init__(self, block: nn.Module, row: BlockRow) -> None:
        super().__init__(block)
        self._row = row

    def forward(self, *args: object, **kwargs: object) -> object:
        """The hidden state."""
        return self._row.like_a_block(hidden_in(self.block, args, kwargs))


class Given(NamedTuple):
    """What a stage is called with.

    Attributes:
        hidden: The hidden state.
        trains: Whether gradients are wanted.
    """

    hidden: Tensor
    trains: bool


class Entry(StandIn):
    """The first block of a stage: computes from a hidden state that comes from elsewhere."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.given: Given | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the block makes of the hidden state that is given.

        Raises:
            ConfigurationError: If the model computes its blocks without gradients, or a second time.
        """
        if self.given is None or self.given.trains != torch.is_grad_enabled():
            raise ConfigurationError(
                "model_init",
                type(self.block).__name__,
                "is recomputed by the model's own forward (with torch.utils.checkpoint?), which skips what "
                "hands on hidden states",
                "set activation_checkpointing instead",
            )
        args, kwargs = with_hidden(self.block, self.given.hidden, args, kwargs)
        return self.block(*args, **kwargs)


class Exit(StandIn):
    """The block after a stage: ends the model's forward."""

    def forward(self, *args: object, **kwargs: object) -> object:
        """Raise the end of the stage."""
        raise StageEnd(hidden_in(self.block, args, kwargs))


def hidden_in(block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """The hidden state among the arguments of a block: its first one.

    Raises:
        ConfigurationError: If it is not a tensor.
    """
    found = args[0] if args else kwargs.get(_name_of_hidden(block))
    if not isinstance(found, Tensor):
        raise ConfigurationError(
            "model_splitter",
            type(block).__name__,
            "does not get the hidden state as its first argument, so stages cannot hand it on",
            "give a model_splitter that makes the stages of this model",
        )
    return found


def with_hidden(
    block: nn.Module, hidden: Tensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a block with another hidden state."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, _name_of_hidden(block): hidden}


def _name_of_hidden(block: nn.Module) -> str:
    return next(iter(inspect.signature(block.forward).parameters), "")


class BlockStage(nn.Module):
    """Consecutive blocks of a model, with what comes before the first or after the last block of all.

    Args:
        model: The whole model, of which other parts may be missing.
        row: Its blocks.
        span: Which of them.
        before: Modules before the blocks.
        after: Modules after them.
    """

    def __init__(
        self,
        model: nn.Module,
        row: BlockRow,
        span: range,
        before: Sequence[nn.Module],
        after: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.span = span
        self.blocks = nn.ModuleList(row.blocks[place] for place in span)
        self._model = (model,)
        self.row = row
        self.is_first, self.is_last = span.start == 0, span.stop == len(row.blocks)
        self.others = nn.ModuleList([*(before if self.is_first else ()), *(after if self.is_last else ())])
        self.around = (tuple(before), tuple(after))
        """The modules before and after the blocks, whoever has them."""
        self._idle = () if self.is_first else self.around[0]
        self._entry = (Entry(row.blocks[span.start]),)
        self._standing = tuple(self._stand(place) for place in range(len(row.blocks)))
        self._verified = False
        self.instead: Callable[[], object] | None = None
        """What to compute in its place: a call of the model as a whole, in which this stage takes part."""

    @property
    def model(self) -> nn.Module:
        """The model whose forward is called."""
        return self._model[0]

    def forward(self, hidden: Tensor | None, **inputs: object) -> object:
        """Compute the stage.

        Args:
            hidden: What the stage before gave, usually [rows, sequence, features]; None for the first one.
            **inputs: The keyword arguments of the model, the same for every stage.

        Returns:
            The hidden state; what the model returns for the last stage.

        Raises:
            ConfigurationError: If the model's forward does not go through its blocks.
        """
        if self.instead is not None:
            return self.instead()
        entry = self._entry[0]
        # Past `nn.Module.__setattr__`, which takes longer than all else here.
        vars(entry)["given"] = None if hidden is None else Given(hidden, torch.is_grad_enabled())
        try:
            verified = nullcontext() if self._verified else self._verifying()
            with self.row.standing(self._standing), idle(self._idle), verified:
                return self.model(**inputs)
        except StageEnd as end:
            return end.hidden
        finally:
            vars(entry)["given"] = None

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        """A context for the first call, at whose end the blocks must have been called once each, in order."""
        called: list[nn.Module] = []

        def note(module: nn.Module, args: object) -> None:
            called.append(module)

        hooks = [module.register_forward_pre_hook(note) for module in dict.fromkeys(self._standing)]
        try:
            yield
        except StageEnd:
            self._verify(called, self.span.stop + 1)
            raise
        finally:
            for hook in hooks:
                hook.remove()
        self._verify(called, len(self._standing))

    def _verify(self, called: Sequence[nn.Module], count: int) -> None:
        if _by_the_model(called) != list(self._standing[:count]):
            raise ConfigurationError(
                "model_splitter",
                type(self.model).__name__,
                f"does not call the blocks of {self.row.path} once each, one after another",
                "name their container in transformer_layers_path, or give a model_splitter",
            )
        self._verified = True

    def _stand(self, place: int) -> nn.Module:
        block = self.row.blocks[place]
        if place < self.span.start:
            return Passed(block, self.row)
        if place == self.span.start and not self.is_first:
            return self._entry[0]
        if place in self.span:
            return block
        return Exit(block)


def _by_the_model(called: Sequence[nn.Module]) -> list[nn.Module]:
    """Calls of modules in the row, without that of the first block by what stands for it."""
    before: list[nn.Module | None] = [None, *called]
    return [
        module
        for earlier, module in zip(before, called, strict=False)
        if not (isinstance(earlier, Entry) and earlier.block is module)
    ]


class Bound(nn.Module):
    """The last stage together with the hidden state that it is given: called like the model as a whole."""

    def __init__(self, stage: nn.Module, model: nn.Module, hidden: Tensor | None) -> None:
        super().__init__()
        self._held = (stage, model, hidden)
        self.training = stage.training

    def forward(self, **inputs: object) -> object:
        """What the model returns."""
        stage, _, hidden = self._held
        return stage(hidden, **inputs)

    def __getattr__(self, name: str) -> object:  # type: ignore[override]
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_held"][1], name)
