"""Rules of `FSDP2TrainingArguments`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer_core import ConfigurationError

if TYPE_CHECKING:
    from .arguments import FSDP2Arguments, FSDP2TrainingArguments

DTYPES = ("float32", "bfloat16", "float16")
"""The last one is refused by another rule, which says why."""


def check_fsdp2(args: FSDP2TrainingArguments) -> None:
    """Check single values first, then what belongs together.

    Raises:
        ConfigurationError: For the first rule that is broken.
    """
    _check_values(args)
    _check_combinations(args)


def _check_values(args: FSDP2TrainingArguments) -> None:
    fsdp2 = args.fsdp2
    _check_types(fsdp2)
    for name in ("param_dtype", "reduce_dtype"):
        value = getattr(fsdp2, name)
        if value not in (None, *DTYPES):
            raise ConfigurationError(
                f"fsdp2.{name}", value, "must be one of float32, bfloat16", "choose one of these"
            )
    if fsdp2.replicas < 1:
        raise ConfigurationError("fsdp2.replicas", fsdp2.replicas, "must be at least 1", "raise it")
    if fsdp2.prefetch_depth is not None and fsdp2.prefetch_depth < 1:
        raise ConfigurationError(
            "fsdp2.prefetch_depth", fsdp2.prefetch_depth, "must be at least 1", "raise it, or leave it out"
        )
    reshard = fsdp2.reshard_after_forward
    if not isinstance(reshard, bool) and reshard < 2:
        raise ConfigurationError(
            "fsdp2.reshard_after_forward", reshard, "must be true, false or at least 2 ranks", "use true"
        )
    if fsdp2.layer_classes is not None and not fsdp2.layer_classes:
        raise ConfigurationError("fsdp2.layer_classes", (), "names no class", "leave it out")


def _check_types(fsdp2: FSDP2Arguments) -> None:
    """Refuse values of other types, which a call from Python may give."""
    if not isinstance(fsdp2.replicas, int) or isinstance(fsdp2.replicas, bool):
        raise ConfigurationError("fsdp2.replicas", fsdp2.replicas, "must be a whole number", "give one")
    if not isinstance(fsdp2.reshard_after_forward, int):
        raise ConfigurationError(
            "fsdp2.reshard_after_forward",
            fsdp2.reshard_after_forward,
            "must be true, false or a number of ranks",
            "use true",
        )
    if fsdp2.layer_classes is not None and not isinstance(fsdp2.layer_classes, tuple):
        raise ConfigurationError(
            "fsdp2.layer_classes",
            fsdp2.layer_classes,
            "must be a tuple of names",
            "put it into one: ('Block',)",
        )


def _check_combinations(args: FSDP2TrainingArguments) -> None:
    fsdp2 = args.fsdp2
    if args.fuse_optim_with_backward:
        raise ConfigurationError(
            "fuse_optim_with_backward",
            True,
            "steps each parameter before its gradient was added up over the ranks",
            "leave it out",
        )
    for setting, value in (
        ("mixed_precision", args.mixed_precision),
        ("default_dtype", args.default_dtype),
        ("fsdp2.param_dtype", fsdp2.param_dtype),
        ("fsdp2.reduce_dtype", fsdp2.reduce_dtype),
    ):
        if value in ("fp16", "float16"):
            raise ConfigurationError(
                setting,
                value,
                "needs a loss scale that all ranks decide on together, which torch does not have for shards",
                "use bf16",
            )
    if fsdp2.fp8_all_gather and args.fp8_recipe != "tensorwise":
        raise ConfigurationError(
            "fsdp2.fp8_all_gather",
            True,
            f"needs fp8_recipe='tensorwise', whose scales fit any shard, and it is {args.fp8_recipe!r}",
            "set fp8_recipe='tensorwise', or leave it out",
        )
    if (
        args.torch_compile_full_graph
        and args.torch_compile_scope == "model"
        and fsdp2.shard_transformer_layers
    ):
        raise ConfigurationError(
            "torch_compile_full_graph",
            True,
            "excludes torch_compile_scope='model' where layers are sharded by themselves: their weights are "
            "gathered between compiled pieces",
            "set torch_compile_scope='blocks', or leave torch_compile_full_graph out",
        )
    if fsdp2.reduce_each_microbatch and args.gradient_accumulation_steps == 1:
        raise ConfigurationError(
            "fsdp2.reduce_each_microbatch",
            True,
            "has no effect with gradient_accumulation_steps=1",
            "leave it out",
        )
    if not fsdp2.shard_transformer_layers:
        for name in ("layer_classes", "prefetch_depth"):
            value = getattr(fsdp2, name)
            if value is not None:
                raise ConfigurationError(
                    f"fsdp2.{name}",
                    value,
                    "has no effect without fsdp2.shard_transformer_layers",
                    "leave one of them out",
                )
