"""Output head and cross-entropy in one, from hidden states, so that the logits never exist whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dist_env import get_logger

from ..errors import ConfigurationError
from .backends import BACKENDS, check_backend, choose
from .chunked import ChunkedOptions
from .head import HeadBypass, checked_head
from .sharded import is_sharded, whole
from .token_loss import check_next_token_labels, count_next_tokens, next_tokens

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


class FusedLinearCrossEntropy:
    """Cross-entropy of the next token from hidden states, for large vocabularies.

    Same numbers as `CausalLMLoss` over the logits of the head, without the logits: their memory, tokens x
    vocabulary, is the largest of a training step. The head's weight may be a DTensor (FSDP2, tensor
    parallel): it is gathered for the call, and its gradient reduced to the shards as the SUM over the ranks,
    so give FSDP2 a gradient divide factor of 1.

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
        ConfigurationError: If the head is no plain linear layer, or the backend is missing or does not know
            this loss.
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
            raise ConfigurationError("chunk_tokens", chunk_tokens, "must be at least 1", "leave it out")
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
        self._bypass = HeadBypass(self.head)
        self._options: dict[torch.dtype, ChunkedOptions] = {}

    def count(self, labels: Tensor) -> Tensor:
        """Number of predicted positions.

        Args:
            labels: Integers [batch, sequence].

        Returns:
            int64 scalar.

        Raises:
            ConfigurationError: If the labels are something else.
        """
        check_next_token_labels(labels)
        return count_next_tokens(labels)

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

    def __call__(self, predictions: object, labels: Tensor) -> Tensor:
        """Sum of the losses.

        Args:
            predictions: What `predict` returned, or hidden states [batch, sequence, features].
            labels: int64 [batch, sequence], not shifted.

        Returns:
            float32 scalar.

        Raises:
            ConfigurationError: If these are no hidden states for the head and the labels.
        """
        if isinstance(predictions, Tensor):
            predictions = HiddenStates(predictions, _autocast_dtype(predictions))
        if not isinstance(predictions, HiddenStates):
            raise ConfigurationError(
                "fused_loss",
                type(predictions).__name__,
                "the fused loss is computed from hidden states",
                "call it with what its method predict returned",
            )
        hidden, same_data = predictions.values, None
        if is_sharded(hidden):
            hidden = whole(hidden, None)  # a DTensor here is data that all ranks of its mesh share
        else:
            same_data = self.same_data
        check_next_token_labels(labels)
        self._check_shapes(hidden, labels)
        head, options = self.head, self._options_for(predictions.autocast_dtype or hidden.dtype)
        return BACKENDS[self._backend_for(options)](
            hidden.reshape(-1, hidden.shape[-1]),
            whole(head.weight, same_data),
            None if head.bias is None else whole(head.bias, same_data),
            next_tokens(labels),
            options,
        )

    def _check_shapes(self, hidden: Tensor, labels: Tensor) -> None:
        expected = (*labels.shape, self.head.in_features)
        if hidden.shape != expected:
            raise ConfigurationError(
                "fused_loss",
                list(hidden.shape),
                f"the hidden states must have the shape {list(expected)}: that of the labels, and the "
                "features that the output head takes",
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
