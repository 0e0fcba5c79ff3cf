"""Memory as it is measured and as plans count it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
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
from ..errors import ConfigurationError


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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the memory behind what operators return, once per storage, until it is freed.

    It sees the tensors that autograd keeps, those that recomputation and caches keep, and what comes and goes
    in between. What a kernel allocates inside itself it does not see.

    Args:
        uncounted: Tensors whose memory belongs to somebody else, such as parameters.
    """

    def __init__(self, uncounted: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """Most bytes that were alive at a time."""
        self._uncounted = [tensor.untyped_storage() for tensor in uncounted]
        self._known: dict[int, object] = {id(storage): storage for storage in self._uncounted}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= size

        # torch keeps the Python object of a storage for as long as the memory lives.
        self._known[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


_SHARE, _BYTES = 0.05, 2**30

MARGIN_STANDS_FOR = (
    "fragmentation of the allocator, workspaces of kernels, buffers of NCCL, the libraries themselves"
)
"""What no plan counts."""


def margin_of(size: int) -> int:
    """Bytes to add to so many that are planned: 5 % of them, and 1 GiB."""
    return int(_SHARE * size) + _BYTES


@dataclass(frozen=True)
class PlannedBatch:
    """Rows of token ids and labels of one length; or a batch that is given, of which only shapes count.

    Attributes:
        sequence_length: Tokens of a row.
        batch: What a model gets at a time, instead; with `labels`.

    Raises:
        ConfigurationError: If neither or both are given, a row is too short to predict anything, or the
            batch has no labels.
    """

    sequence_length: int | None = None
    batch: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        if (self.sequence_length is None) == (self.batch is None):
            raise ConfigurationError(
                "sequence_length",
                self.sequence_length,
                "is needed to know the activations, unless a batch is given",
                "give one of sequence_length and batch",
            )
        if self.sequence_length is not None and self.sequence_length < 2:
            raise ConfigurationError(
                "sequence_length", self.sequence_length, "must be at least 2", "raise it"
            )
        if self.batch is not None and not isinstance(self.batch.get("labels"), Tensor):
            raise ConfigurationError(
                "batch", sorted(self.batch), "has no tensor 'labels'", "give it, of any values"
            )

    def of(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Zeros of the shapes and dtypes of a batch.

        Args:
            rows: How many, where no batch is given.
            device: Where they are made; on meta they take no memory.
        """
        if self.batch is not None:
            return {
                name: torch.zeros(value.shape, dtype=value.dtype, device=device)
                for name, value in self.batch.items()
            }
        ids = torch.zeros((rows, self.sequence_length or 0), dtype=torch.int64, device=device)
        return {"input_ids": ids, "labels": ids.clone()}
