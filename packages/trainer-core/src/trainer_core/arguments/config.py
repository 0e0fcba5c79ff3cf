"""Arguments from dicts, their help texts, and how the arguments of two sessions of a run differ."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

from ..errors import ConfigurationError, Dataclass
from ..hints import suggest
from .choices import WITHOUT_TOTAL
from .minimal import GUARDED, UNCHANGEABLE, epoch_limit

T = TypeVar("T")


def arguments_from_dict(cls: type[T], mapping: Mapping[str, object]) -> T:
    """Build an argument dataclass from a plain mapping.

    Args:
        cls: The dataclass; nested dataclasses are built as well.
        mapping: Field names and values. A whole number is accepted where a float is asked for, and a list of
            texts or whole numbers where a tuple of them is.

    Returns:
        The checked instance.

    Raises:
        ConfigurationError: For an unknown key (with the nearest known one), a wrong type, or a broken rule.
    """
    import dacite  # which help texts do without

    _refuse_unknown_keys(cls, mapping, prefix="")
    hooks: dict[Any, Callable[[object], object]] = {float: _float_from_int}
    hooks |= dict.fromkeys((tuple[str, ...], tuple[int, ...]), _tuple_from_list)
    config = dacite.Config(strict=True, type_hooks=hooks)
    try:
        return dacite.from_dict(cls, dict(mapping), config=config)
    except dacite.WrongTypeError as error:
        name = error.field_path or "?"
        # Of a collection dacite shows what it was making of it, not what was given.
        value = mapping.get(name, error.value)
        raise ConfigurationError(
            name,
            value,
            f"must be {_type_name(error.field_type)}, got {type(value).__name__}",
            "write a value of that type",
        ) from error
    except dacite.MissingValueError as error:
        raise ConfigurationError(
            error.field_path or "?", None, "is required, because it has no default", "give it a value"
        ) from error


def field_docs(cls: type) -> dict[str, str]:
    """Read the string literal below each dataclass field, parents included.

    Args:
        cls: A dataclass whose source can be read.

    Returns:
        Field name to its text, in one line; fields without a string are left out.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_of_module(base.__module__).get(base.__qualname__, {})
    return docs


@cache
def _docs_of_module(name: str) -> dict[str, dict[str, str]]:
    """By name of a class at the top of a module, which is read once and not for each class again."""
    body = ast.parse(inspect.getsource(sys.modules[name])).body
    return {node.name: _docs_of_class(node) for node in body if isinstance(node, ast.ClassDef)}


def _docs_of_class(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[statement.target.id] = " ".join(below.value.value.split())
    return docs


def _refuse_unknown_keys(cls: type, mapping: Mapping[str, object], prefix: str) -> None:
    known = {field.name for field in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    for key, value in mapping.items():
        if key not in known:
            raise ConfigurationError(
                f"{prefix}{key}", value, "is not a known setting", suggest(str(key), known)
            )
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            _refuse_unknown_keys(hints[key], value, prefix=f"{prefix}{key}.")


def _float_from_int(value: object) -> object:
    """Let `1` stand for `1.0`, but not `True`."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # which is out of every range


def _tuple_from_list(value: object) -> object:
    """Let a list, as files have it, stand for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


WARNED = frozenset(
    {
        *GUARDED,
        "num_train_epochs",
        "epoch_train_steps",
        "max_steps",
        "optim",
        "ema_decay",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "max_grad_norm",
        "default_dtype",
        "mixed_precision",
        "fp8_recipe",
        "fp8_dim_alignment",
        "fp8_exclude",
        "fp8_emulate",
        "float32_matmul_precision",
        "label_smoothing",
        "z_loss",
        "nonfinite_policy",
    }
)
"""The curve continues differently from the saved run."""

_STOPPING_POINTS = frozenset({"max_steps", "num_train_epochs", "epoch_train_steps"})
_WITHOUT_END = ("", *WITHOUT_TOTAL)
_OF_A_START = frozenset(
    {"allow_changes", "memory_save_steps", "overwrite_output_dir", "resume_from_checkpoint"}
)
"""They say how a start treats what is there, and nothing about the run."""


class Change(NamedTuple):
    """One argument that differs."""

    name: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.name}: {self.before!r} before, {self.now!r} now"


class Changes(NamedTuple):
    """The arguments that differ, by what that means; every other one is unchanged."""

    allowed: tuple[Change, ...]
    """Does not touch the curve: schedules of logs, evaluations and saves, memory, speed, places."""
    warned: tuple[Change, ...]
    refused: tuple[Change, ...]


_OF_A_COPY = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""What a model's configuration says of how it was saved or is called, and not of what it computes."""


def plain_model_config(model: object) -> dict[str, object] | None:
    """What the `config` of a model says of what it computes, as JSON values; None if the model has none."""
    config = getattr(model, "config", None)
    if callable(to_dict := getattr(config, "to_dict", None)):
        values = to_dict()
    elif is_dataclass(config) and not isinstance(config, type):
        values = plain_arguments(config)
    else:
        values = config
    if not isinstance(values, Mapping):
        return None
    kept = {str(key): value for key, value in values.items() if str(key) not in _OF_A_COPY}
    public = {key: value for key, value in kept.items() if not key.startswith("_")}
    plain: dict[str, object] = json.loads(json.dumps(public, default=lambda value: type(value).__name__))
    return plain


def compare_model_configs(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[Change, ...]:
    """The entries of two models' configurations that differ; one that a version lacks is not compared."""
    names = sorted(before.keys() & now.keys())
    return tuple(
        Change(f"config.{name} of the model", before[name], now[name])
        for name in names
        if before[name] != now[name]
    )


def compare(before: Mapping[str, object], now: Dataclass, *, batch: tuple[object, object]) -> Changes:
    """Compare the arguments of a checkpoint with those of this start.

    Args:
        before: As `plain_arguments` gave them; arguments that it lacks did not exist then.
        now: The argument dataclass of this start.
        batch: Examples of an optimizer step over all ranks, before and now.

    Returns:
        The differences.
    """
    current = plain_arguments(now)
    allowed, warned, refused = [], [], []
    # Moving the end of a run changes the curve only if the schedule aims at the end.
    aims_at_end = current.get("lr_scheduler_type") not in _WITHOUT_END
    harmless = frozenset() if aims_at_end else _STOPPING_POINTS
    # It had to be -1 once where max_steps was meant alone.
    same_epochs = _epoch_limit_of(before) == _epoch_limit_of(current)
    for name in sorted((current.keys() & before.keys()) - _OF_A_START):
        if before[name] == current[name] or (name == "num_train_epochs" and same_epochs):
            continue
        change = Change(name, before[name], current[name])
        # A checkpoint with an average has that in the place of the weights.
        if name in UNCHANGEABLE or (name == "ema_decay" and current[name] is None):
            refused.append(change)
        elif name in WARNED - harmless:
            warned.append(change)
        else:
            allowed.append(change)
    if batch[0] != batch[1]:
        warned.append(Change("examples of an optimizer step, over all ranks", *batch))
    return Changes(tuple(allowed), tuple(warned), tuple(refused))


def _epoch_limit_of(arguments: Mapping[str, object]) -> object:
    epochs, steps = arguments.get("num_train_epochs"), arguments.get("max_steps")
    if isinstance(steps, int) and (epochs is None or isinstance(epochs, int | float)):
        return epoch_limit(epochs, steps)
    return epochs


def plain_arguments(args: Dataclass) -> dict[str, object]:
    """The arguments as JSON values, by name; nested argument classes become tables."""
    return {field.name: _plain(getattr(args, field.name)) for field in fields(args)}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain_arguments(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
