"""Output head and cross-entropy in one, so that the logits never exist whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dist_env import get_logger

from ..errors import ConfigurationError
from .chunked import LOGITS_AT_A_TIME, ChunkedOptions, chunked_linear_cross_entropy
from .head import HeadBypass, checked_head, is_divided
from .token_loss import IGNORE_INDEX, NextTokenLoss


def whole(weight: Tensor, same_data: Collection[str] | None = ()) -> Tensor:
    """Gather a sharded weight; its gradient is reduced back to the shards.

    Args:
        weight: A tensor, which is returned as it is, or a DTensor of any placement, uneven shards included.
        same_data: Names of the mesh dimensions whose ranks work on the same data (tensor parallel): their
            gradients are equal, and are not added up. Over all others they are. None: all dimensions.

    Returns:
        The whole weight on this rank. The gradient of a DTensor is a DTensor of the same placement: the SUM
        over the ranks, not their mean.
    """
    if type(weight) in (Tensor, nn.Parameter):
        return weight
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not isinstance(weight, DTensor):
        return weight
    mesh = weight.device_mesh
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    gradients = [Replicate() if same_data is None or name in same_data else Partial() for name in names]
    gathered: Tensor = weight.full_tensor(grad_placements=gradients)
    return gathered


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


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
            "needs the chunked linear_cross_entropy of torch 2.13 or later, but this is torch "
            f"{torch.__version__}",
            "update torch, or set fused_loss='chunked'",
        )
    if name in _PACKAGES:
        _check_kernels(name, device)
    check_terms(name, label_smoothing=label_smoothing, z_loss=z_loss, bias=bias)


def check_terms(name: str, *, label_smoothing: float, z_loss: float, bias: bool = False) -> None:
    """Refuse a backend that cannot compute this loss, wherever it runs.

    Args:
        name: As in `check_backend`, likewise the others.
        label_smoothing: Of the loss.
        z_loss: Of the loss.
        bias: Whether the head has a bias.

    Raises:
        ConfigurationError: Naming what it does not support.
    """
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
            "fused_loss", name, f"does not support {' and '.join(unknown)}", "set fused_loss='chunked'"
        )


def _check_kernels(name: str, device: torch.device) -> None:
    module, package = _PACKAGES[name]
    for needed, command in ((module, package), ("triton", "triton")):
        if importlib.util.find_spec(needed) is None:
            raise ConfigurationError(
                "fused_loss",
                name,
                f"needs the package {command}, which is not installed",
                f"install it with `pip install {command}`, or set fused_loss='auto'",
            )
    if device.type in ("cpu", "mps"):
        raise ConfigurationError(
            "fused_loss",
            name,
            f"uses {package}, whose Triton kernels need a GPU, but the output head is on {device.type}",
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
            f"uses torch's linear_cross_entropy, which adds up the loss in {_name(dtype)}, where a sum over "
            "many tokens is rounded away or overflows",
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
    from liger_kernel.transformers import (
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
    from cut_cross_entropy import (
        linear_cross_entropy,
    )

    dtype = options.compute_dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigurationError(
            "fused_loss",
            "cut",
            f"differentiates products in bfloat16 and float16 only, but the products here are {_name(dtype)}",
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


_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class HiddenStates:
    """What the output head would have been given.

    Attributes:
        values: Floating [batch, sequence, features].
        autocast_dtype: Dtype that autocast would have computed the head in; None without autocast.
    """

    values: Tensor
    autocast_dtype: torch.dtype | None


class FusedLinearCrossEntropy(NextTokenLoss):
    """Cross-entropy of the next token from hidden states, for large vocabularies.

    Same numbers as `CausalLMLoss` over the logits of the head, without the logits: their memory, tokens x
    vocabulary, is the largest of a training step. The head's weight may be a DTensor (FSDP2): it is gathered
    for the call, and its gradient reduced to the shards as the SUM over the ranks, so give FSDP2 a gradient
    divide factor of 1. Of a head that `model_parallel` has divided each rank computes its part of the
    vocabulary, with the backends auto and chunked.

    Args:
        head: The model's output head, a plain nn.Linear. Its weight may be tied or frozen.
        backend: auto, torch, chunked, liger or cut; auto takes torch or chunked, and `backend_in_use` says
            which.
        label_smoothing: Share of the target mass spread evenly over the vocabulary, 0 to 1.
        z_loss: Weight of the squared log-partition term of PaLM (Chowdhery et al. 2022, section 5).
        chunk_tokens: Tokens whose logits exist at one time; none: as many as make 64 MiB in float32.
        same_data: Names of the dimensions of the weight's device mesh whose ranks work on the same data, as
            in tensor parallelism: there the gradients are equal, and are not added up.

    Raises:
        ConfigurationError: If the head is not a plain linear layer, or the backend is missing or does not
            know this loss.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        backend: str = "auto",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk_tokens: int | None = None,
        same_data: tuple[str, ...] = (),
    ) -> None:
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ConfigurationError(
                "chunk_tokens", chunk_tokens, "must be at least 1", "set it to 1 or more, or leave it out"
            )
        self.head = checked_head(head)
        self.backend = backend
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.chunk_tokens = chunk_tokens
        self.same_data = same_data
        self.backend_in_use: str | None = None
        """Who computed the last loss; None before the first."""
        check_backend(
            backend,
            device=self.head.weight.device,
            bias=self.head.bias is not None,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        if backend not in ("auto", "chunked") and is_divided(self.head):
            raise ConfigurationError(
                "fused_loss",
                backend,
                "needs an output head that is whole, and tensor parallelism has divided it by the vocabulary",
                "set fused_loss='chunked'",
            )
        self._bypass = HeadBypass(self.head)
        self._options: dict[torch.dtype, ChunkedOptions] = {}

    def predict(self, model: nn.Module, inputs: Mapping[str, object], labels: Tensor) -> HiddenStates:
        """Run a model up to its output head.

        Args:
            model: The module to call, with all wrappers.
            inputs: Its keyword arguments, without labels.
            labels: Not used.

        Raises:
            ConfigurationError: If the model's logits are not what its head returns.
        """
        values = self._bypass.hidden_states(model, inputs)
        return HiddenStates(values, _autocast_dtype(values))

    def on_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        """Sum of the losses over what `make_targets` made, or any part of it.

        Args:
            predictions: What `predict` returned, or hidden states [batch, sequence, features].
            targets: int64 [batch, sequence]; nothing is shifted.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If these are not hidden states for the head and the targets.
        """
        if isinstance(predictions, Tensor):
            predictions = HiddenStates(predictions, _autocast_dtype(predictions))
        if not isinstance(predictions, HiddenStates):
            raise ConfigurationError(
                "fused_loss",
                type(predictions).__name__,
                "cannot be scored by the fused loss, which is computed from hidden states",
                "call it with what its method predict returned",
            )
        hidden, same_data = predictions.values, None
        if is_sharded(hidden):
            hidden = whole(hidden, None)  # a DTensor here is data that all ranks of its mesh share
        else:
            same_data = self.same_data
        if is_divided(self.head):
            return self._by_vocabulary(hidden, predictions.autocast_dtype, targets)
        self._check_shapes(hidden, targets)
        head, options = self.head, self._options_for(predictions.autocast_dtype or hidden.dtype)
        return BACKENDS[self._backend_for(options)](
            hidden.reshape(-1, hidden.shape[-1]),
            whole(head.weight, same_data),
            None if head.bias is None else whole(head.bias, same_data),
            targets.reshape(-1),
            options,
        )

    def _by_vocabulary(self, hidden: Tensor, autocast_dtype: torch.dtype | None, targets: Tensor) -> Tensor:
        """The sum, of a head whose ranks each have a part of the vocabulary."""
        from model_parallel import sharded_linear_cross_entropy

        self.backend_in_use = "chunked"
        return sharded_linear_cross_entropy(
            hidden if autocast_dtype is None else hidden.to(autocast_dtype),
            self.head,
            targets,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            chunk_tokens=self.chunk_tokens,
        )

    def _check_shapes(self, hidden: Tensor, targets: Tensor) -> None:
        expected = (*targets.shape, self.head.in_features)
        if hidden.shape != expected:
            raise ConfigurationError(
                "fused_loss",
                list(hidden.shape),
                f"is the shape of the hidden states, which must be {list(expected)}: that of the labels, and "
                "the features that the output head takes",
                "have the model return a prediction for every position, or set fused_loss='no'",
            )

    def _options_for(self, dtype: torch.dtype) -> ChunkedOptions:
        if dtype not in self._options:
            self._options[dtype] = ChunkedOptions(dtype, self.label_smoothing, self.z_loss, self.chunk_tokens)
        return self._options[dtype]

    def _backend_for(self, options: ChunkedOptions) -> str:
        name = choose(options) if self.backend == "auto" else self.backend
        if name != self.backend_in_use:
            self.backend_in_use = name
            _LOGGER.info("fused loss: computed by %s in %s", name, options.compute_dtype)
        return name


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype of a linear layer under the present autocast; None if there is none for this tensor."""
    kind = hidden.device.type
    # Autocast leaves float64 alone.
    if hidden.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
