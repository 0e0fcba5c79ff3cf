"""Rules for Prometheus, and the text of the file that has them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_WIDTH = 110


@dataclass(frozen=True)
class RecordingRule:
    """A series that is computed again and again.

    Attributes:
        name: Of the series.
        expression: PromQL.
        comment: Stands above it.
        labels: Further labels of the series.
    """

    name: str
    expression: str
    comment: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AlertRule:
    """An alert.

    Attributes:
        name: Of the alert.
        expression: PromQL; fires for each series of its result.
        minutes: How long it has to hold before it fires.
        severity: "critical", "warning" or "info".
        summary: One line.
        description: What it means and what to do next.
    """

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    description: str


@dataclass(frozen=True)
class RuleGroup:
    """Rules that are evaluated one after the other, at one time.

    Attributes:
        name: Of the group.
        interval_s: Seconds from one evaluation to the next.
        rules: In the order in which they are evaluated.
        comment: Stands above it.
    """

    name: str
    interval_s: int
    rules: Sequence[RecordingRule | AlertRule]
    comment: str = ""


def rules_as_yaml(groups: Sequence[RuleGroup], comment: str) -> str:
    """Return the text of a file with rules."""
    lines = [*_comment(comment, 0), "groups:"]
    for group in groups:
        lines += ["", *_comment(group.comment, 2), f"  - name: {group.name}"]
        lines += [f"    interval: {group.interval_s}s", "    rules:"]
        for rule in group.rules:
            lines += _recording(rule) if isinstance(rule, RecordingRule) else _alert(rule)
    return "\n".join(lines) + "\n"


def _recording(rule: RecordingRule) -> Iterator[str]:
    yield from _comment(rule.comment, 6)
    yield f"      - record: {rule.name}"
    yield from _expression(rule.expression)
    if rule.labels:
        yield "        labels:"
        yield from (f"          {name}: {_quoted(value)}" for name, value in rule.labels.items())


def _alert(rule: AlertRule) -> Iterator[str]:
    yield f"      - alert: {rule.name}"
    yield from _expression(rule.expression)
    yield f"        for: {rule.minutes}m"
    yield "        labels:"
    yield f"          severity: {rule.severity}"
    yield "        annotations:"
    for name, text in (("summary", rule.summary), ("description", rule.description)):
        # Folded: the line breaks are read as spaces.
        yield f"          {name}: >-"
        yield from _wrapped(text, " " * 12)


def _expression(text: str) -> Iterator[str]:
    if "\n" not in text and '"' not in text:
        yield f"        expr: {_quoted(text)}"
        return
    # As it is, line by line.
    yield "        expr: |-"
    yield from (f"          {line}" for line in text.splitlines())


def _comment(text: str, indent: int) -> Iterator[str]:
    yield from _wrapped(text, " " * indent + "# ") if text else ()


def _wrapped(text: str, prefix: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _quoted(text: str) -> str:
    # A string of JSON is one of YAML.
    return json.dumps(text)
