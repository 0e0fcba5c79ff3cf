"""Adds evaluation and best checkpoints, precision, and switches of the PyTorch runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigurationError, Dependent, refuse_without_effect
from . import rules
from .choices import FP8_RECIPES, QAT_RECIPES
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
    """Leave alone linear layers whose sizes are not multiples of this; 0: leave none alone for that."""
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
    """Implementations of attention to allow: math, flash, efficient, cudnn. None: those that torch chooses,
    and FlexAttention for attention within documents and of parts of sequences."""
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


NonFinitePolicy = Literal["stop", "skip", "raise"]
NONFINITE_POLICIES: tuple[NonFinitePolicy, ...] = ("stop", "skip", "raise")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "default_dtype": (None, "float32", "bfloat16", "float16"),
    "mixed_precision": (None, "no", "bf16", "fp16"),
    "fp8_recipe": (None, *FP8_RECIPES),
    "float32_matmul_precision": (None, "highest", "high", "medium"),
    "fused_loss": ("no", "auto", "torch", "chunked", "liger", "cut"),
    "nonfinite_policy": NONFINITE_POLICIES,
}
_ATTENTION = ("math", "flash", "efficient", "cudnn")
# Each of these puts another class in the place of a linear layer.
_LINEAR_SWAPS = ("fp8_recipe", "qat_recipe")


def check_base(args: BaseTrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    for name, choices in _CHOICES.items():
        rules.one_of(name, getattr(args, name), choices)
    rules.one_of("qat_recipe", args.qat_recipe, (None, *QAT_RECIPES))
    rules.at_least_or("max_eval_steps", args.max_eval_steps, 1, off=-1)
    rules.at_least("preserve_n_best", args.preserve_n_best, 1)
    rules.at_least("fp8_dim_alignment", args.fp8_dim_alignment, 0)
    rules.within("label_smoothing", args.label_smoothing, 0.0, 1.0 - 1e-9)
    rules.within("z_loss", args.z_loss, 0.0, 1e3)
    if args.dynamo_recompile_limit is not None:
        rules.at_least("dynamo_recompile_limit", args.dynamo_recompile_limit, 1)
    _check_attention(args)
    _check_linear_swaps(args)
    _check_best(args)
    _check_plateau(args)
    refuse_without_effect(args, _unused(args))


def _check_attention(args: BaseTrainingArguments) -> None:
    given = args.sdpa_backend
    names = (given,) if isinstance(given, str) else given or ()
    for name in names:
        rules.one_of("sdpa_backend", name, _ATTENTION)


def _check_linear_swaps(args: BaseTrainingArguments) -> None:
    asked = [name for name in _LINEAR_SWAPS if getattr(args, name) is not None]
    if len(asked) > 1:
        raise ConfigurationError(
            asked[0],
            getattr(args, asked[0]),
            f"cannot be combined with {asked[1]}={getattr(args, asked[1])!r}, because both replace the "
            "linear layers",
            "leave one of them out",
        )


def _check_plateau(args: BaseTrainingArguments) -> None:
    follows = args.lr_scheduler_type == "reduce_lr_on_plateau"
    if follows and args.eval_strategy == "no" and not args.eval_on_save:
        raise ConfigurationError(
            "lr_scheduler_type",
            args.lr_scheduler_type,
            "follows a metric of the evaluations, but eval_strategy is 'no'",
            "set eval_strategy='steps' or 'epoch'",
        )


def _check_best(args: BaseTrainingArguments) -> None:
    _check_aliases(args, "metric_for_best_model", "best_model_metric", "loss")
    _check_aliases(args, "greater_is_better", "best_model_greater_is_better", None)
    if not args.tracks_best:
        return
    wish = "load_best_model_at_end" if args.load_best_model_at_end else "preserve_best_model"
    if args.eval_strategy == "no" and not args.eval_on_save:
        raise ConfigurationError(
            wish,
            True,
            "needs evaluations to compare, but eval_strategy is 'no'",
            "set eval_strategy='steps' or 'epoch'",
        )
    if args.save_strategy == "no":
        raise ConfigurationError(
            wish,
            True,
            "needs checkpoints to choose from, but save_strategy is 'no'",
            "set save_strategy='steps' or 'epoch'",
        )
    aligned = args.save_strategy == args.eval_strategy and (
        args.save_strategy == "epoch" or args.save_steps % args.eval_steps == 0
    )
    if not args.eval_on_save and not aligned:
        raise ConfigurationError(
            wish,
            True,
            f"needs an evaluation at every checkpoint, but checkpoints come by {_when(args, 'save')} "
            f"and evaluations by {_when(args, 'eval')}",
            "set eval_on_save=True, or use one strategy for both with save_steps a multiple of eval_steps",
        )
    lower_or_greater_by_name = any(word in args.best_metric for word in ("loss", "perplexity"))
    if args.best_is_greater is None and not lower_or_greater_by_name:
        raise ConfigurationError(
            "best_model_greater_is_better",
            None,
            f"must be set, because the name {args.best_metric!r} does not tell which value is better",
            "set it to True for an accuracy, for example, or to False for an error",
        )


def _check_aliases(args: BaseTrainingArguments, alias: str, name: str, unset: object) -> None:
    one, other = getattr(args, alias), getattr(args, name)
    if one is not None and other != unset and one != other:
        raise ConfigurationError(
            alias,
            one,
            f"is another name of {name}, and contradicts {name}={other!r}",
            "set only one of the two",
        )


def _when(args: BaseTrainingArguments, what: str) -> str:
    strategy = getattr(args, f"{what}_strategy")
    return (
        f"{what}_steps={getattr(args, f'{what}_steps')}" if strategy == "steps" else f"strategy {strategy!r}"
    )


def _unused(args: BaseTrainingArguments) -> Iterator[Dependent]:
    if args.fp8_recipe is None:
        for name in ("fp8_dim_alignment", "fp8_exclude", "fp8_emulate"):
            yield Dependent(name, "while fp8_recipe is not set", "set fp8_recipe='tensorwise'")
    if isinstance(args.sdpa_backend, str) or len(args.sdpa_backend or ()) < 2:
        yield Dependent("sdpa_set_priority", "with fewer than two backends", "list several in sdpa_backend")
    if not args.torch_compile:
        yield Dependent("dynamo_recompile_limit", "while torch_compile is off", "set torch_compile=True")
    if not args.preserve_best_model:
        yield Dependent("preserve_n_best", "while preserve_best_model is off", "set preserve_best_model=True")
    if not args.tracks_best:
        condition = "while neither load_best_model_at_end nor preserve_best_model is on"
        for name in (
            "best_model_metric",
            "metric_for_best_model",
            "best_model_greater_is_better",
            "greater_is_better",
        ):
            yield Dependent(name, condition, "switch one of them on")
    if args.save_strategy == "no":
        yield Dependent("eval_on_save", "with save_strategy='no'", "set save_strategy='steps'")
