"""Attention as it is on a GPU, for plans that are made on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..arguments import TrainingArguments

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
