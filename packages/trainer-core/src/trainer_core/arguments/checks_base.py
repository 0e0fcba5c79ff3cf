"""Rules of `BaseTrainingArguments`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import rules
from ..errors import ConfigurationError
from ..precision.recipes import FP8_RECIPES, QAT_RECIPES
from .effects import Dependent, refuse_without_effect

if TYPE_CHECKING:
    from .base import BaseTrainingArguments

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "default_dtype": (None, "float32", "bfloat16", "float16"),
    "mixed_precision": (None, "no", "bf16", "fp16"),
    "fp8_recipe": (None, *FP8_RECIPES),
    "float32_matmul_precision": (None, "highest", "high", "medium"),
    "fused_loss": ("no", "auto", "torch", "chunked", "liger", "cut"),
    "nonfinite_policy": ("stop", "skip", "raise"),
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
            f"excludes {asked[1]}={getattr(args, asked[1])!r}: both replace the linear layers",
            "leave one of them out",
        )


def _check_plateau(args: BaseTrainingArguments) -> None:
    follows = args.lr_scheduler_type == "reduce_lr_on_plateau"
    if follows and args.eval_strategy == "no" and not args.eval_on_save:
        raise ConfigurationError(
            "lr_scheduler_type",
            args.lr_scheduler_type,
            "follows a metric of the evaluations, and there are none",
            "set eval_strategy",
        )


def _check_best(args: BaseTrainingArguments) -> None:
    _check_aliases(args, "metric_for_best_model", "best_model_metric", "loss")
    _check_aliases(args, "greater_is_better", "best_model_greater_is_better", None)
    if not args.tracks_best:
        return
    wish = "load_best_model_at_end" if args.load_best_model_at_end else "preserve_best_model"
    if args.eval_strategy == "no" and not args.eval_on_save:
        raise ConfigurationError(
            wish, True, "needs evaluations to compare, and eval_strategy is 'no'", "set eval_strategy"
        )
    if args.save_strategy == "no":
        raise ConfigurationError(
            wish, True, "needs checkpoints to choose from, and save_strategy is 'no'", "set save_strategy"
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
            "set eval_on_save=True, or save_strategy=eval_strategy with save_steps a multiple of eval_steps",
        )
    lower_or_greater_by_name = any(word in args.best_metric for word in ("loss", "perplexity"))
    if args.best_is_greater is None and not lower_or_greater_by_name:
        raise ConfigurationError(
            "best_model_greater_is_better",
            None,
            f"must be set, because the name {args.best_metric!r} does not tell which value is better",
            "set it to true or false",
        )


def _check_aliases(args: BaseTrainingArguments, alias: str, name: str, unset: object) -> None:
    one, other = getattr(args, alias), getattr(args, name)
    if one is not None and other != unset and one != other:
        raise ConfigurationError(
            alias, one, f"is another name of {name}, which is {other!r}", "set one of the two"
        )


def _when(args: BaseTrainingArguments, what: str) -> str:
    strategy = getattr(args, f"{what}_strategy")
    return (
        f"{what}_steps={getattr(args, f'{what}_steps')}" if strategy == "steps" else f"strategy {strategy!r}"
    )


def _unused(args: BaseTrainingArguments) -> Iterator[Dependent]:
    if args.fp8_recipe is None:
        for name in ("fp8_dim_alignment", "fp8_exclude", "fp8_emulate"):
            yield Dependent(name, "while fp8_recipe is not set", "set fp8_recipe")
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
            yield Dependent(name, condition, "set one of them")
    if args.save_strategy == "no":
        yield Dependent("eval_on_save", "with save_strategy='no'", "set save_strategy")
