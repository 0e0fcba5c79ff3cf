"""Memory as it is measured, and as a step on fake tensors would take it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..arguments import TrainingArguments
from ..distributed.ranks import Ranks


def take_peak_memory(ranks: Ranks) -> list[int] | None:
    """Most bytes allocated since the last call, one figure per rank; None without an accelerator."""
    if ranks.device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(ranks.device)
    torch.cuda.reset_peak_memory_stats(ranks.device)
    return [int(value) for (value,) in ranks.gather([float(peak)])]


_DROPOUT = 4
"""Place of `dropout_p` among the arguments of scaled_dot_product_attention."""


def attention_of_gpus(args: TrainingArguments) -> AbstractContextManager[object]:
    """A context in which attention on the CPU keeps what that of a GPU keeps, as far as shapes tell.

    Only the plain implementation keeps matrices of sequence by sequence; the CPU takes it for dropout too.

    Args:
        args: sdpa_backend.
    """
    plain = args.sdpa_backend in ("math", ("math",))
    return sdpa_kernel(SDPBackend.MATH) if plain else _WithoutDropout()


class _WithoutDropout(TorchFunctionMode):
    """Leaves dropout out of attention: a GPU's flash kernel keeps a seed for it, and the CPU's has none."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            named.pop("dropout_p", None)
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :]) if len(args) > _DROPOUT else args
        return func(*args, **named)


ACTIVATIONS, GATHERED, REDUCED, GRADIENTS = "activations", "gathered", "reduced", "gradients"
"""What memory is for. Everything that no other word fits is an activation."""

_OF_COLLECTIVES = {
    "all_gather_copy_in": GATHERED,
    "split_with_sizes_copy": GATHERED,
    "chunk_cat": REDUCED,
    "_allgather_base_": GATHERED,
    "_reduce_scatter_base_": REDUCED,
    "allreduce_": REDUCED,
}
"""What the tensors are that these operators are given.

FSDP2 packs and unpacks what it sends by operators of its own (`torch.ops.fsdp`, private, here of torch 2.13).
Under other names gathered weights and travelling gradients would count as activations, and weights that it
has freed as still there; test_plan_state.py of trainer-fsdp2 watches this against real ranks.
"""


class LiveBytes(TorchDispatchMode):
    """While active, follows the memory behind what operators return, once per storage, until it is freed.

    It sees the tensors that autograd keeps, those that recomputation and caches keep, and what comes and goes
    in between. What a kernel allocates inside itself it does not see.

    Args:
        uncounted: Tensors whose memory belongs to somebody else, such as parameters.
        keeps_sends: Keep what is sent to other ranks to the end, as if none of them were ready for it before.
    """

    def __init__(self, uncounted: Iterable[Tensor] = (), *, keeps_sends: bool = False) -> None:
        TorchDispatchMode.__init__(self)
        self._uncounted = [tensor.untyped_storage() for tensor in uncounted]
        self._keeps_sends = keeps_sends
        self._sent: list[Tensor] = []
        # By the id of its Python object, which torch keeps for as long as the storage lives.
        self._numbers: dict[int, int] = dict.fromkeys(map(id, self._uncounted), -1)
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: list[int] = []
        self._kinds: list[str] = []
        self._events: list[tuple[int, int]] = []
        self._resizable: set[int] = set()
        self._forward_events: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # a DTensor: its operators on local tensors come here next
        for number in tuple(self._resizable):
            self._reread(number)
        # Private in torch 2.13, which asks it to tell recomputation from the forward pass.
        if self._forward_events is None and torch._C._current_graph_task_id() != -1:
            self._forward_events = len(self._events)
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        if func.namespace in ("fsdp", "c10d"):
            self._note_collective(func._opname, [*tree_leaves(args), *tree_leaves(kwargs)])
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._numbers:
            return
        number = self._numbers[key] = len(self._sizes)

        def freed(_: object) -> None:
            del self._numbers[key]
            self._resizable.discard(number)
            self._resize(number, 0)

        self._sizes.append(0)
        self._kinds.append(ACTIVATIONS)
        self._refs[number] = weakref.ref(storage, freed)
        self._resize(number, storage.nbytes())

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what the memory of tensors is for, from its beginning; the last word counts."""
        for tensor in tensors:
            number = self._numbers.get(id(tensor.untyped_storage()), -1)
            if number >= 0:
                self._kinds[number] = kind

    def most(self, kinds: Collection[str] = (ACTIVATIONS, GATHERED, REDUCED, GRADIENTS)) -> int:
        """Most bytes of these kinds that were alive at a time."""
        return max(self._curve(kinds), default=0)

    @property
    def saved(self) -> int:
        """Bytes of activations that were alive when the first backward pass began."""
        curve = self._curve((ACTIVATIONS,))[: self._forward_events]
        return curve[-1] if curve else 0

    def _curve(self, kinds: Collection[str]) -> list[int]:
        now, curve = 0, []
        for number, change in self._events:
            now += change if self._kinds[number] in kinds else 0
            curve.append(now)
        return curve

    def _resize(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _reread(self, number: int) -> None:
        storage = self._refs[number]()
        if storage is not None:
            self._resize(number, storage.nbytes())
            if not self._sizes[number]:
                self._resizable.discard(number)

    def _note_collective(self, name: str, given: list[object]) -> None:
        tensors = [value for value in given if isinstance(value, Tensor)]
        if name == "send" and self._keeps_sends:
            self._sent += tensors
        kind = _OF_COLLECTIVES.get(name)
        if kind is None:
            return
        for tensor in tensors:
            self.add(tensor)
        self.mark(tensors, kind)
        if name == "split_with_sizes_copy":
            # FSDP2 allocates and frees these by resizing their storage, which no operator tells of. They were
            # allocated just now; that they are freed is seen with the next operator.
            numbers = {self._numbers.get(id(tensor.untyped_storage()), -1) for tensor in tensors} - {-1}
            self._resizable |= numbers
            for number in numbers:
                self._reread(number)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Parameters, gradients and optimizer state are exact, the rest is that of a step on fake tensors. Each
    figure is the most at any time, so that together they may be more than `peak`.
    """

    rank: int = 0
    """Its place in the pipeline; ranks at the same place need as much at most."""
    stages: tuple[int, ...] = (0,)
    """Its stages of the pipeline."""
    layers: tuple[tuple[int, int], ...] = ()
    """First and last layer of each of its stages; empty if these are not made of layers."""
    parameters: int
    """What it holds of the parameters."""
    gradients: int
    """What it holds of the gradients when it steps the optimizer."""
    optimizer: int
    """What it holds of the optimizer's state."""
    gathered: int
    """Weights of other ranks, whole and as they are received."""
    reduced: int
    """Gradients that wait to be sent, or travel."""
    saved_activations: int
    """Activations that are kept when the first backward pass begins, and the batch."""
    activations: int
    """Activations of all microbatches under way, what comes and goes between operators, and hidden states and
    their gradients that are sent and received."""
    peak: int
    """Most bytes of the device at a time beside parameters and optimizer state."""
    on_host: int = 0
    """Memory of the host that this rank takes: state that rests there, activations that are offloaded."""
    state_on_host: bool = False
    """Whether parameters, gradients and optimizer state rest in the memory of the host."""

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state together, wherever they rest."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """Most bytes of the device at a time."""
        return self.peak + (0 if self.state_on_host else self.parameters + self.optimizer)
