"""One training step of a copy without values."""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from .operator_watch import Booking, CallStack, OperatorWatch


class NotRunError(ValueError):
    """The model does not run without values."""


def run_step(model: nn.Module, batch: Mapping[str, Tensor], original: nn.Module) -> list[Booking]:
    """Run forward and backward, and return what was computed.

    Where a model looks at values, it is tried in other ways: with a mask of its own, so that it does not
    look for packed documents, and with experts that are all called alike.

    Args:
        model: The copy on the meta device.
        batch: Keyword arguments, on the meta device.
        original: The model that was copied, whose tensors must not be met.

    Raises:
        NotRunError: It does not run in any way, with the reason of the first.
    """
    problem: Exception | None = None
    for prepare in _attempts(model, batch):
        try:
            return _run(model, prepare(), original)
        except Exception as error:  # noqa: BLE001 - whatever a model does without values, it is told
            problem = problem or error
    text = str(problem).partition("\n")[0][:200] or type(problem).__name__
    raise NotRunError(text)


def _attempts(model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[Callable[[], Mapping[str, Tensor]]]:
    """Ways to call a model; each gives the arguments when it is to be tried."""
    masked = _with_mask(model, batch)
    ways = [batch] if masked is None else [batch, masked]
    for arguments in ways:
        yield lambda arguments=arguments: arguments  # type: ignore[misc]
    switch = getattr(model, "set_experts_implementation", None)
    if callable(switch):
        for arguments in ways:

            def prepared(arguments: Mapping[str, Tensor] = arguments) -> Mapping[str, Tensor]:
                # Which experts are used must not change what is called.
                switch("batched_mm")
                return arguments

            yield prepared


def _with_mask(model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
    """The arguments with a mask that is used as it is; None if the model takes none."""
    tokens = batch.get("input_ids")
    if tokens is None or "attention_mask" in batch or not _takes(model, "attention_mask"):
        return None
    length = tokens.shape[-1]
    return {**batch, "attention_mask": torch.zeros((tokens.shape[0], 1, length, length), device="meta")}


def _takes(model: nn.Module, name: str) -> bool:
    taken = inspect.signature(model.forward).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in taken)


def _run(model: nn.Module, batch: Mapping[str, Tensor], original: nn.Module) -> list[Booking]:
    calls = CallStack(model)
    watch = OperatorWatch(calls, original)
    with ExitStack() as stack:
        stack.enter_context(_generators_put_back())
        stack.enter_context(torch.enable_grad())
        # What the forward makes for itself, such as a mask, has no values either.
        stack.enter_context(torch.device("meta"))
        stack.enter_context(calls)
        stack.enter_context(watch)
        outputs = [output for output in _tensors(_call(model, batch)) if output.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        elif any(parameter.requires_grad for parameter in model.parameters()):
            raise NotRunError("nothing that it returns depends on its trained parameters")
    return watch.bookings


@contextmanager
def _generators_put_back() -> Iterator[None]:
    drawn, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.random.set_state(arrays)


def _call(model: nn.Module, batch: Mapping[str, Tensor]) -> object:
    """Call with keywords; a row of tokens goes first where the model has another name for it."""
    if "input_ids" in batch and not _takes(model, "input_ids"):
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        return model(batch["input_ids"], **rest)
    return model(**batch)


def _tensors(output: object) -> list[Tensor]:
    """What a loss would be made of: the loss or the logits where a model says so, else what it returns."""
    for name in ("loss", "logits", "last_hidden_state"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return [value]
    return list(_leaves(output))


def _leaves(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _leaves(getattr(output, field.name))
