"""The output head of a model, the hidden states that it is given, and losses of one's own on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..model.meta_model import is_fake
from .token_loss import TargetLoss, TokenLoss, logits_of, member, takes_targets

_LEAVE_OUT = "set fused_loss='no' for this model"


def bare(model: nn.Module) -> nn.Module:
    """The module inside a data-parallel or compiled wrapper."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def output_head(model: nn.Module) -> nn.Linear:
    """The linear layer that `model.get_output_embeddings()` names.

    Raises:
        ConfigurationError: If the model does not name one, or it is not a plain linear layer.
    """
    getter = getattr(bare(model), "get_output_embeddings", None)
    if not callable(getter):
        raise ConfigurationError(
            "fused_loss",
            type(bare(model)).__name__,
            "does not say which layer makes the logits",
            "give it a method get_output_embeddings() that returns its output nn.Linear, or set "
            "fused_loss='no'",
        )
    return checked_head(getter())


def checked_head(head: object) -> nn.Linear:
    """Return the head if its output is `input @ weight.T + bias`.

    Raises:
        ConfigurationError: If it is something else, such as a layer converted to FP8 or prepared for QAT.
    """
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(
            "fused_loss",
            type(head).__name__,
            "is not an nn.Linear, which the output head must be",
            _LEAVE_OUT,
        )
    plain = type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    if not plain and not is_divided(head):
        raise ConfigurationError(
            "fused_loss",
            f"{type(head).__module__}.{type(head).__name__}",
            "is an output head that computes something of its own (converted to FP8, prepared for QAT, an "
            "adapter?), where the fused loss would compute a plain matrix product",
            "leave the head out of the conversion (fp8_exclude, or the layers that QAT prepares), or set "
            "fused_loss='no'",
        )
    if _is_quantised(head.weight):
        raise ConfigurationError(
            "fused_loss",
            type(head.weight).__name__,
            "is a special kind of tensor, which the weight of the output head must not be",
            "leave the head out of the quantisation, or set fused_loss='no'",
        )
    return head


def is_divided(head: nn.Linear) -> bool:
    """Whether tensor parallelism has divided the head by the vocabulary."""
    if type(head) is nn.Linear:
        return False
    from model_parallel import is_sharded_head  # seconds, which other heads do not take

    return is_sharded_head(head)


def _is_quantised(weight: Tensor) -> bool:
    if type(weight) in (Tensor, nn.Parameter) or is_fake():
        return False
    from torch.distributed.tensor import DTensor

    return not isinstance(weight, DTensor)


class HeadBypass:
    """Has a model return the input of its output head in place of its logits.

    While the model runs, the head passes its input through. Afterwards the model's "logits" must be that
    very tensor, unchanged: a model that scales, caps, cuts or casts its logits is refused, as the loss would
    be quietly wrong for it. A model may also offer its hidden states itself: `can_return_hidden_states`
    that is true, and `forward(..., return_hidden_states=True)`.

    Args:
        head: The output head; it is left as it was after each call.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head = head
        self.calls = 0
        self.given: Tensor | None = None
        self.version = 0
        self.sample: Tensor | None = None
        self._verified: set[tuple[bool, bool]] = set()
        # One object for good: a compiled model is compiled again for another one.
        self._forward: Callable[[Tensor], Tensor] = self._pass_through

    def hidden_states(self, model: nn.Module, inputs: Mapping[str, object]) -> Tensor:
        """Run the model.

        Args:
            model: The module to call, with all wrappers.
            inputs: Its keyword arguments.

        Returns:
            Floating [batch, sequence, features].

        Raises:
            ConfigurationError: If the model's logits are not what its head returns.
        """
        if getattr(bare(model), "can_return_hidden_states", False):
            return _offered(model(**inputs, return_hidden_states=True))
        with self._bypassed():
            returned = logits_of(model(**inputs))
            self._verify(returned, model)
        return returned

    @contextmanager
    def _bypassed(self) -> Iterator[None]:
        self._forget()
        # nn.Module would take a module or parameter only; a method may be any object.
        self.head.forward = self._forward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del self.head.forward
            self._forget()

    def _forget(self) -> None:
        self.calls, self.given, self.version, self.sample = 0, None, 0, None

    def _pass_through(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.given = hidden
        if torch.compiler.is_compiling():
            # Compiled code has no versions, so a change in place is seen by comparing a part.
            self.sample = hidden.detach().select(-1, 0).clone()
        elif not hidden.is_inference():
            self.version = hidden._version
        return hidden

    def _verify(self, returned: Tensor, model: nn.Module) -> None:
        found = self._difference(returned, model.training)
        if found is not None:
            raise ConfigurationError("fused_loss", type(bare(model)).__name__, found, _LEAVE_OUT)

    def _difference(self, returned: Tensor, training: bool) -> str | None:
        """What keeps the model's logits from being the head's output; None if nothing."""
        given = self.given
        if given is None or self.calls != 1:
            return (
                f"called its output head {self.calls} times in a forward pass, but the fused loss takes the "
                "place of exactly one call"
            )
        if not (returned is given or _same_memory(returned, given)):
            return (
                "does not return the logits of its output head as they are: it scales, caps, cuts, casts "
                f"or copies them afterwards (the head returned {given.dtype} {list(given.shape)}, the model "
                f"{returned.dtype} {list(returned.shape)}), and the fused loss would leave that out"
            )
        if self._changed_in_place(returned, training):
            return "changes its logits in place, and the fused loss would leave that out"
        return None

    def _changed_in_place(self, returned: Tensor, training: bool) -> bool:
        if self.sample is None:
            return not returned.is_inference() and returned._version != self.version
        case = (training, torch.is_grad_enabled())
        if case in self._verified:
            return False  # once for each graph, as it waits for the device
        self._verified.add(case)
        return not torch.allclose(
            self.sample, returned.detach().select(-1, 0), rtol=0, atol=0, equal_nan=True
        )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors are the same numbers in the same memory, with the same gradient."""
    if type(one) is not Tensor or type(other) is not Tensor:
        return False
    same_layout = (one.shape, one.stride(), one.dtype, one.device) == (
        other.shape,
        other.stride(),
        other.dtype,
        other.device,
    )
    return same_layout and one.requires_grad == other.requires_grad and one.data_ptr() == other.data_ptr()


def _offered(outputs: object) -> Tensor:
    """The hidden states that a model returned on request."""
    if isinstance(outputs, Tensor):
        return outputs
    for name in ("last_hidden_state", "hidden_states"):
        found = member(outputs, name)
        if isinstance(found, Tensor):
            return found
    raise ConfigurationError(
        "fused_loss",
        type(outputs).__name__,
        "is neither a tensor nor has a last_hidden_state, although the model says can_return_hidden_states "
        "and was called with return_hidden_states=True",
        "return the tensor that the output head is given, or remove can_return_hidden_states",
    )


FusedLossFactory = Callable[[nn.Module], TokenLoss]
"""Called with the output head; gives a sum-and-count loss of `(hidden states, labels)`."""


class HiddenStatesLoss:
    """Gives a loss the input of the model's output head in place of the logits.

    Args:
        head: The output head, a plain nn.Linear.
        loss: The loss of what the head is given.
    """

    def __init__(self, head: nn.Linear, loss: TokenLoss) -> None:
        self.loss = loss
        self._bypass = HeadBypass(head)

    def count(self, labels: Tensor) -> Tensor:
        """Number of positions that count: int64 scalar."""
        return self.loss.count(labels)

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> Tensor:
        """Run the model up to its output head: hidden states [batch, sequence, features]."""
        return self._bypass.hidden_states(model, inputs)

    def __call__(self, predictions: Any, labels: Tensor) -> Tensor:
        """Sum of the losses: float32 scalar."""
        return self.loss(predictions, labels)


class HiddenStatesTargetLoss(HiddenStatesLoss):
    """The same, of a loss that takes targets."""

    loss: TargetLoss

    def make_targets(self, labels: Tensor) -> Tensor:
        """What the prediction at each place is compared with, in the shape of the labels."""
        return self.loss.make_targets(labels)

    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses: float32 scalar."""
        return self.loss.on_targets(predictions, targets)


def hidden_states_loss(head: nn.Module, factory: FusedLossFactory) -> HiddenStatesLoss:
    """The loss that a factory makes from the output head, with the head's input in place of logits.

    Args:
        head: The output head, a plain nn.Linear.
        factory: Makes the loss.

    Raises:
        ConfigurationError: If the head is not a plain linear layer, or the factory gives no sum-and-count
            loss.
    """
    checked = checked_head(head)
    loss = factory(checked)
    if not callable(loss) or not callable(getattr(loss, "count", None)):
        raise ConfigurationError(
            "fused_loss_factory",
            loss,
            "must return a loss that returns a sum and tells how many positions count",
            "return an object with __call__(hidden, labels) and count(labels)",
        )
    return (HiddenStatesTargetLoss if takes_targets(loss) else HiddenStatesLoss)(checked, loss)
