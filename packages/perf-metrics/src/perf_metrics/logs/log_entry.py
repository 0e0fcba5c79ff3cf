"""What a log entry is made of."""

from __future__ import annotations

from typing import TypeAlias, Union

JsonValue: TypeAlias = Union[str, int, float, bool, "list[JsonValue]", "dict[str, JsonValue]", None]
LogEntry: TypeAlias = dict[str, JsonValue]
