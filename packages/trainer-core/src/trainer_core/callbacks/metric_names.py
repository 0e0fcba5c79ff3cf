"""Turns a log record into the flat, grouped scalars that trackers store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Real

from torch import Tensor


def scalars_of(record: Mapping[str, object]) -> dict[str, float]:
    """The numbers of a log record under grouped names.

    | record | names |
    |---|---|
    | training | `train/<key>` |
    | evaluation | `eval/<key without eval_>`; its `epoch` is left out, the training record has it |
    | final metrics (with `train_runtime`) | `final/<key>` |
    | a key with a slash | stays as it is |

    The items of a list become `<name>/rank0`, `<name>/rank1` and so on, those of a dict `<name>/<key>`. None
    and whatever is no number is left out. A tensor of one element is brought to the host.
    """
    return {
        name: number
        for key, value in record.items()
        if (grouped := _grouped(key, record)) is not None
        for name, number in _flat(grouped, value)
    }


def config_of(args: object) -> dict[str, object]:
    """The run's arguments as JSON values; what JSON does not have becomes text."""
    if not is_dataclass(args):
        return {}
    return {field.name: _json_value(getattr(args, field.name)) for field in fields(args)}


def _grouped(key: str, record: Mapping[str, object]) -> str | None:
    if "/" in key:
        return key
    if "train_runtime" in record:
        return f"final/{key}"
    if key.startswith("eval_"):
        return f"eval/{key.removeprefix('eval_')}"
    is_evaluation = "loss" not in record and any(name.startswith("eval_") for name in record)
    return None if key == "epoch" and is_evaluation else f"train/{key}"


def _flat(name: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        yield name, float(value)
    elif isinstance(value, list | tuple):
        for rank, item in enumerate(value):
            yield from _flat(f"{name}/rank{rank}", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}/{key}", item)


def _json_value(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return str(value)
