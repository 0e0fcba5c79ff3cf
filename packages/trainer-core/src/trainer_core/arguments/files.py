"""Settings from TOML and YAML files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigurationError


def load_config_file(path: str | Path) -> dict[str, object]:
    """Read settings from a TOML or YAML file, by its suffix.

    Numbers with an exponent but no dot or sign, such as `3e4`, are numbers in YAML files too.

    Args:
        path: A file that ends in .toml, .yaml or .yml.

    Returns:
        Its top-level table.

    Raises:
        ConfigurationError: If it is missing, unreadable, malformed, nested too deeply, gives a name twice, or
            has a number or date that does not exist, or that YAML 1.1 counts to the base 8 or 60 (with the
            line), or holds no table at the top.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigurationError(
            "config",
            str(path),
            "must end in .toml, .yaml or .yml",
            "rename or convert the file, for example to run.yaml",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "config", str(path), f"cannot be read ({error})", "check its path and permissions"
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
            "config", str(path), f"is malformed{place}: {error}", "correct that line"
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigurationError(
            "config",
            str(path),
            "must have names with values at the top level",
            "write one setting a line, such as `max_steps: 100`",
        )
    return content


def _line_of_long_number(text: str) -> str:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(r"[\d_]{4301,}", line):  # as many digits as Python converts, and one more
            return f" in line {number}"
    return ""


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OTHER_BASE = re.compile(r"[-+]?(0[\d_]+|[^:]+(:[^:]+)+)")
"""What PyYAML, which follows YAML 1.1, counts to the base 8 (`010`) or 60 (`1:30`)."""

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
            where = yaml.SafeLoader.peek_event(self).start_mark
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
        if isinstance(node, yaml.ScalarNode) and _OTHER_BASE.fullmatch(node.value) and node.tag in _NUMBERS:
            raise yaml.MarkedYAMLError(
                problem=f"{node.value!r} would not be the number that it looks like: write its decimal "
                "digits without zeros in front, or put a text in quotes",
                problem_mark=node.start_mark,
            )
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
