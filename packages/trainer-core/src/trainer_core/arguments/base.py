"""Adds evaluation and best checkpoints, precision, and switches of the PyTorch runtime."""

from __future__ import annotations

from dataclasses import dataclass

from .checks_base import check_base
from .minimal import MinimalTrainingArguments


@dataclass(frozen=True, kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Adds checkpoint policy, precision and the switches of the PyTorch runtime."""

    default_dtype: str | None = None
    """Dtype in which the model is built: float32, bfloat16 or float16."""
    max_eval_steps: int = -1
    """Most batches per evaluation and rank; -1: the whole evaluation set."""
    preserve_best_model: bool = False
    """Keep the best checkpoints beside save_total_limit."""
    best_model_metric: str = "loss"
    """Metric of an evaluation that ranks checkpoints; `loss` stands for `eval_loss`."""
    best_model_greater_is_better: bool | None = None
    """Whether the greater value wins; none: by the name, lower for a loss or a perplexity."""
    preserve_n_best: int = 1
    """How many of the best checkpoints preserve_best_model keeps."""
    eval_on_save: bool = False
    """Evaluate right before every checkpoint."""

    mixed_precision: str | None = None
    """bf16 or fp16: matrix products in it under autocast, weights stay as they are; fp16 scales the loss."""
    fp8_recipe: str | None = None
    """Linear layers in float8 through torchao: tensorwise (fastest), rowwise or rowwise_with_gw_hp."""
    fp8_dim_alignment: int = 16
    """Leave alone linear layers whose sizes are no multiples of this; 0: leave none alone for that."""
    fp8_exclude: tuple[str, ...] = ()
    """Name patterns of layers that stay out of float8."""
    fp8_emulate: bool = False
    """Compute float8 by rounding, for devices without float8 units; slow, for tests."""
    qat_recipe: str | None = None
    """Quantization-aware training through torchao: name of a recipe."""
    float32_matmul_precision: str | None = None
    """Precision of float32 matrix products during the run: highest, high (TF32) or medium."""

    label_smoothing: float = 0.0
    """Share of the target mass that the built-in loss spreads over the vocabulary, 0 to below 1."""
    z_loss: float = 0.0
    """Weight of the squared log-partition in the built-in loss (PaLM, section 5)."""
    fused_loss: str = "no"
    """Loss without whole logits: no, auto, torch, chunked, liger or cut."""
    nonfinite_policy: str = "stop"
    """A gradient that is not finite: stop the run, skip the step, or raise; no such step is applied."""

    enable_activation_offloading: bool = False
    """Keep saved activations in host memory until the backward pass."""
    detect_anomaly: bool = False
    """Anomaly mode of autograd, for debugging; slow."""
    sdpa_backend: str | tuple[str, ...] | None = None
    """Implementations of attention to allow: math, flash, efficient, cudnn."""
    sdpa_set_priority: bool = False
    """Try the implementations of attention in the order given."""
    dynamo_recompile_limit: int | None = None
    """How often torch.compile may compile one piece of code anew."""

    def check(self) -> None:
        """Check every rule of this class and its parents.

        Raises:
            ConfigurationError: For the first rule that is broken.
        """
        super().check()
        check_base(self)

    @property
    def autocast_dtype(self) -> str | None:
        """The dtype of autocast: bf16 or fp16; None without mixed precision."""
        return None if self.mixed_precision in (None, "no") else self.mixed_precision

    @property
    def matmul_dtype(self) -> str:
        """Name of the dtype in which matrix products run, as the peak tables name it."""
        if self.autocast_dtype is not None:
            return self.autocast_dtype
        short = {"bfloat16": "bf16", "float16": "fp16"}
        if self.default_dtype in short:
            return short[self.default_dtype]
        return "tf32" if self.float32_matmul_precision in ("high", "medium") else "fp32"

    @property
    def tracks_best(self) -> bool:
        """Whether checkpoints are ranked by a metric."""
        return self.preserve_best_model or self.load_best_model_at_end

    @property
    def best_metric(self) -> str:
        """Key of an evaluation's result that ranks checkpoints."""
        name = self.metric_for_best_model or self.best_model_metric
        return name if name.startswith("eval_") else f"eval_{name}"

    @property
    def best_is_greater(self) -> bool | None:
        """Whether the greater value of `best_metric` wins; None leaves it to the name."""
        given = self.best_model_greater_is_better
        return self.greater_is_better if given is None else given
