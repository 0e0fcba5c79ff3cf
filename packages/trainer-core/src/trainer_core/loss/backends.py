"""Who computes the fused loss: torch, the chunked implementation here, or a kernel library."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigurationError
from .chunked import LOGITS_AT_A_TIME, ChunkedOptions, chunked_linear_cross_entropy
from .token_loss import IGNORE_INDEX

Backend = Callable[[Tensor, Tensor, Tensor | None, Tensor, ChunkedOptions], Tensor]
"""`(hidden [rows, features], weight, bias, targets [rows], options) -> sum of the losses`, scalar."""

_EXACT = (torch.float32, torch.float64)
_PACKAGES = {"liger": ("liger_kernel", "liger-kernel"), "cut": ("cut_cross_entropy", "cut-cross-entropy")}


def check_backend(
    name: str, *, device: torch.device, bias: bool, label_smoothing: float, z_loss: float
) -> None:
    """Refuse a backend that is not there or cannot compute this loss.

    Args:
        name: auto, torch, chunked, liger or cut.
        device: Where the head is.
        bias: Whether the head has a bias.
        label_smoothing: Of the loss.
        z_loss: Of the loss.

    Raises:
        ConfigurationError: Naming what is missing.
    """
    if name not in ("auto", *BACKENDS):
        names = ", ".join(("auto", *BACKENDS))
        raise ConfigurationError("fused_loss", name, f"must be one of {names}", "choose one of these")
    if name == "torch" and not torch_has_it():
        raise ConfigurationError(
            "fused_loss",
            name,
            f"torch {torch.__version__} has no chunked linear_cross_entropy; it came with 2.13",
            "update torch, or set fused_loss='chunked'",
        )
    if name in _PACKAGES:
        _check_kernels(name, device)
    unknown = [
        what
        for what, asked, known in (
            ("label_smoothing", label_smoothing, ("chunked", "liger")),
            ("z_loss", z_loss, ("chunked", "liger")),
            ("a bias of the output head", bias, ("torch", "chunked", "liger")),
        )
        if asked and name not in ("auto", *known)
    ]
    if unknown:
        raise ConfigurationError(
            "fused_loss", name, f"does not know {' and '.join(unknown)}", "set fused_loss='chunked'"
        )


def _check_kernels(name: str, device: torch.device) -> None:
    module, package = _PACKAGES[name]
    for needed, command in ((module, package), ("triton", "triton")):
        if importlib.util.find_spec(needed) is None:
            raise ConfigurationError(
                "fused_loss",
                name,
                f"needs the package {command}, which is not installed",
                f"pip install {command}, or set fused_loss='auto'",
            )
    if device.type in ("cpu", "mps"):
        raise ConfigurationError(
            "fused_loss",
            name,
            f"{package} is made of Triton kernels, which need a GPU; the output head is on {device.type}",
            "train on a GPU, or set fused_loss='auto'",
        )


def torch_has_it() -> bool:
    """Whether the installed torch has a linear_cross_entropy that works in chunks."""
    return hasattr(functional, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def choose(options: ChunkedOptions) -> str:
    """What `auto` means: torch where it is exact and knows the loss, chunked elsewhere.

    torch 2.13 adds the loss up in the dtype of the products: a sum over 8192 tokens was 1.6% off in bfloat16
    and infinite in float16. It knows neither label smoothing nor a z-loss.
    """
    plain = not (options.label_smoothing or options.z_loss)
    return "torch" if torch_has_it() and plain and options.compute_dtype in _EXACT else "chunked"


def with_torch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkedOptions
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy` in chunks.

    Raises:
        ConfigurationError: If the products are not float32 or float64.
    """
    dtype = options.compute_dtype
    if dtype not in _EXACT:
        raise ConfigurationError(
            "fused_loss",
            "torch",
            f"torch's linear_cross_entropy adds the loss up in {_name(dtype)}, which rounds a sum over many "
            "tokens away or overflows",
            "set fused_loss='chunked' or 'auto', or train in float32",
        )
    # torch's own choice of chunk was 32 rows at 4096 x 256 x 32000, and three times slower on a CPU.
    rows = options.rows or max(1, LOGITS_AT_A_TIME // weight.shape[0])
    return functional.linear_cross_entropy(
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        linear_bias=None if bias is None else bias.to(dtype),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
    )


def with_liger(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkedOptions
) -> Tensor:
    """Liger's fused kernel; it waits for the device once a call, to count the tokens."""
    from liger_kernel.transformers import (  # type: ignore[import-not-found, unused-ignore]
        LigerFusedLinearCrossEntropyLoss,
    )

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX,
        lse_square_scale=options.z_loss,
        label_smoothing=options.label_smoothing,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    dtype = options.compute_dtype
    with torch.autocast(hidden.device.type, enabled=False):
        biased = None if bias is None else bias.to(dtype)
        total: Tensor = loss(weight.to(dtype), hidden.to(dtype), targets, biased)
    return total.float()


def with_cut(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkedOptions
) -> Tensor:
    """Apple's cut cross-entropy, with its filter of small gradients off.

    Raises:
        ConfigurationError: If the products are not bfloat16 or float16.
    """
    from cut_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        linear_cross_entropy,
    )

    dtype = options.compute_dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigurationError(
            "fused_loss",
            "cut",
            f"its kernels differentiate bfloat16 and float16 only; the products here are {_name(dtype)}",
            "set mixed_precision='bf16', or fused_loss='auto'",
        )
    with torch.autocast(hidden.device.type, enabled=False):
        # Per row, and added up here: cut-cross-entropy 25.1 would add up in the dtype of the products.
        rows: Tensor = linear_cross_entropy(
            hidden.to(dtype).contiguous(),
            weight.to(dtype),
            targets,
            ignore_index=IGNORE_INDEX,
            reduction="none",
            filter_eps=None,
        )
    return rows.float().sum()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BACKENDS: dict[str, Backend] = {
    "torch": with_torch,
    "chunked": chunked_linear_cross_entropy,
    "liger": with_liger,
    "cut": with_cut,
}
"""Every backend by its name in `fused_loss`."""
