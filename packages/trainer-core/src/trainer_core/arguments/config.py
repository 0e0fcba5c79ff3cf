"""Arguments from dicts and from TOML or YAML files, and how the arguments of two sessions of a run differ."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import dacite
import yaml

from ..errors import ConfigurationError
from .choices import WITHOUT_TOTAL

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
            error.field_path or "?", None, "has no default and was not given", "give it a value"
        ) from error


def load_config_file(path: str | Path) -> dict[str, object]:
    """Read settings from a TOML or YAML file, by its suffix.

    Numbers with an exponent but no dot or sign, such as `3e4`, are numbers in YAML files too.

    Args:
        path: A file that ends in .toml, .yaml or .yml.

    Returns:
        Its top-level table.

    Raises:
        ConfigurationError: If it is missing, unreadable, malformed, nested too deeply, gives a name twice, or
            has a number or date that does not exist (with the line), or holds no table at the top.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigurationError(
            "config", str(path), "must end in .toml, .yaml or .yml", "rename or convert the file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "config", str(path), f"cannot be read ({error})", "check path and rights"
        ) from error
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, Loader=_YamlLoader)
    except RecursionError as error:
        # Only of TOML: the loader below counts levels itself, as this would take it very long to notice.
        raise ConfigurationError("config", str(path), "is nested too deeply", "flatten it") from error
    # ValueError: a date that does not exist, or a whole number of more digits than Python converts.
    except (yaml.YAMLError, ValueError) as error:
        place = _line_of_long_number(text) if type(error) is ValueError else ""
        raise ConfigurationError(
            "config", str(path), f"is malformed{place}: {error}", "mend that line"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigurationError(
            "config", str(path), "must hold names with values at the top", "write `name: value`"
        )
    return content


def suggest(name: str, known: Iterable[str]) -> str:
    """Say which known name comes nearest to a mistyped one.

    Returns:
        A hint such as "did you mean 'max_steps'?", or where to find the names.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else "see the list of settings for what exists"


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
            docs.update(_docs_in_source(base))
    return docs


def _docs_in_source(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docs: dict[str, str] = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
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


def _line_of_long_number(text: str) -> str:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(r"[\d_]{4301,}", line):  # as many digits as Python converts, and one more
            return f" in line {number}"
    return ""


def _tuple_from_list(value: object) -> object:
    """Let a list, as files have it, stand for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


_DEEPEST = 32
"""Levels of nesting in a file; settings have two."""


class _YamlLoader(yaml.SafeLoader):
    """Reads `3e-4` as a number and `no` as text, as YAML 1.2 does; refuses a name that is given twice."""

    _depth = 0

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # The text is read as far as it is asked for, so that this stops before the rest costs time.
        if self._depth > _DEEPEST:
            where = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels of nesting", problem_mark=where)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


REFUSED = frozenset({"seed", "seed_per_rank", "dataloader_shuffle", "dataloader_drop_last", "qat_recipe"})
"""The saved state has no meaning under another value: data order, generators, fake-quantized weights."""

WARNED = frozenset(
    {
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
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

_STOPPING_POINTS = frozenset({"max_steps", "num_train_epochs"})
_WITHOUT_END = ("", *WITHOUT_TOTAL)


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


def compare(before: Mapping[str, object], now: object, *, batch: tuple[object, object]) -> Changes:
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
    for name in sorted(current.keys() & before.keys()):
        if before[name] == current[name]:
            continue
        change = Change(name, before[name], current[name])
        if name in REFUSED:
            refused.append(change)
        elif name in WARNED - harmless:
            warned.append(change)
        else:
            allowed.append(change)
    if batch[0] != batch[1]:
        warned.append(Change("examples of an optimizer step, over all ranks", *batch))
    return Changes(tuple(allowed), tuple(warned), tuple(refused))


def plain_arguments(args: object) -> dict[str, object]:
    """The arguments as JSON values, by name; nested argument classes become tables."""
    return {field.name: _plain(getattr(args, field.name)) for field in fields(args)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return plain_arguments(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
