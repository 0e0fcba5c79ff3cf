"""Panels of Grafana as its dashboards' JSON has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Json: TypeAlias = dict[str, object]

DATA_SOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
"""The one that the reader chooses."""
SHARE = "percentunit"
_WIDTH = 24


@dataclass(frozen=True)
class Query:
    """PromQL of a panel.

    Attributes:
        expression: With the dashboard's variables.
        legend: What a series is called, such as "{{hostname}}".
    """

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        name: Its heading.
        query: PromQL for its numbers; None for a label, which is there because a query has it.
        label: The label, where it is one.
        field: Settings of the column beyond its heading.
    """

    name: str
    query: str | None = None
    label: str | None = None
    field: Mapping[str, object] | None = None


def share(**settings: object) -> Json:
    """Return field settings for a share, shown in percent."""
    return {"unit": SHARE, "decimals": 1, **settings}


def time_series(
    title: str,
    text: str,
    queries: Sequence[Query],
    field: Json,
    *,
    legend: str = "list",
    stacked: bool = False,
) -> Json:
    """Return a panel with lines over time.

    Args:
        title: Of the panel.
        text: What it shows, and how to read it.
        queries: A line for each series of each.
        field: Settings of the values.
        legend: "list", or "table" with last, mean, least and greatest value.
        stacked: Whether each line stands on the one before it, as parts of a whole do.
    """
    lines: Json = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "showPoints": "auto"}
    if stacked:
        lines |= {"fillOpacity": 50, "stacking": {"mode": "normal", "group": "A"}}
    figures = ["lastNotNull", "mean", "min", "max"] if legend == "table" else []
    return {
        **_panel("timeseries", title, text, _targets(queries, instant=False)),
        "fieldConfig": _fields({**_PALETTE, **field, "custom": lines}),
        "options": {
            "legend": {"calcs": figures, "displayMode": legend, "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def stat(title: str, text: str, query: Query, field: Json) -> Json:
    """Return a panel with the present value, large."""
    return {
        **_panel("stat", title, text, _targets([query], instant=True)),
        "fieldConfig": _fields(field),
        "options": {
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "reduceOptions": _LAST,
            "textMode": "auto",
        },
    }


def bar_gauge(title: str, text: str, query: Query, field: Json) -> Json:
    """Return a panel with one bar for each series."""
    return {
        **_panel("bargauge", title, text, _targets([query], instant=True)),
        "fieldConfig": _fields({"color": {"mode": "continuous-BlPu"}, **field}),
        "options": {
            "displayMode": "basic",
            "orientation": "horizontal",
            "reduceOptions": _LAST,
            "showUnfilled": True,
            "valueMode": "text",
        },
    }


def table(title: str, text: str, columns: Sequence[Column], *, sort_by: str) -> Json:
    """Return a table, lowest values of a column first, with a row for each set of labels in the answers."""
    return {
        **_panel("table", title, text, _table_targets(columns)),
        "transformations": _merged(columns),
        "fieldConfig": _fields({"custom": {"align": "auto", "filterable": True}}, columns),
        "options": {
            "cellHeight": "sm",
            "showHeader": True,
            "sortBy": [{"desc": False, "displayName": sort_by}],
        },
    }


def scatter(title: str, text: str, columns: Sequence[Column], x: str, y: str, field: Json) -> Json:
    """Return a panel with a point for each set of labels in the answers."""
    axes = [Column(name, field={"custom.axisLabel": name}) for name in (x, y)]
    points: Json = {
        "name": {"fixed": title},
        "x": {"matcher": {"id": "byName", "options": x}},
        "y": {"matcher": {"id": "byName", "options": y}},
    }
    return {
        **_panel("xychart", title, text, _table_targets(columns)),
        "transformations": _merged(columns),
        "fieldConfig": _fields({**_PALETTE, **field}, axes),
        "options": {
            "mapping": "manual",
            "series": [points],
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    }


def row(title: str) -> Json:
    """Return the heading of the panels below it."""
    return {"type": "row", "title": title, "collapsed": False, "panels": []}


def laid_out(lines: Sequence[Sequence[tuple[Json, int, int]]]) -> list[Json]:
    """Return panels with their numbers and places.

    Args:
        lines: From top to bottom; in each the panels from left to right, with width (of 24) and height.
    """
    placed: list[Json] = []
    top = 0
    for line in lines:
        left = 0
        for panel, width, height in line:
            place = {"x": left, "y": top, "w": width, "h": height}
            placed.append({"id": len(placed) + 1, **panel, "gridPos": place})
            left += width
        if left > _WIDTH:
            raise ValueError(
                f"width={left} is too much: the panels of a line must not be wider than {_WIDTH} together."
            )
        top += max(height for _, _, height in line)
    return placed


_PALETTE: Json = {"color": {"mode": "palette-classic"}}
_LAST: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def _panel(kind: str, title: str, text: str, targets: list[Json]) -> Json:
    return {"type": kind, "title": title, "description": text, "datasource": DATA_SOURCE, "targets": targets}


def _targets(queries: Sequence[Query], *, instant: bool) -> list[Json]:
    return [
        {**_target(number, query.expression, instant=instant), "legendFormat": query.legend}
        for number, query in enumerate(queries)
    ]


def _table_targets(columns: Sequence[Column]) -> list[Json]:
    queries = [column.query for column in columns if column.query is not None]
    return [
        {**_target(number, query, instant=True), "format": "table"} for number, query in enumerate(queries)
    ]


def _target(number: int, expression: str, *, instant: bool) -> Json:
    return {
        "refId": _letter(number),
        "datasource": DATA_SOURCE,
        "editorMode": "code",
        "expr": expression,
        "instant": instant,
        "range": not instant,
    }


def _merged(columns: Sequence[Column]) -> list[Json]:
    """One table out of the answers: rows with the same labels become one."""
    numbers = iter(range(len(columns)))
    names = {
        (column.label if column.query is None else f"Value #{_letter(next(numbers))}"): column.name
        for column in columns
    }
    order = {name: place for place, name in enumerate(names)}
    options = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": options}]


def _fields(defaults: Json, columns: Sequence[Column] = ()) -> Json:
    """Settings of all values, and those of single columns."""
    overrides = [
        {
            "matcher": {"id": "byName", "options": column.name},
            "properties": [{"id": name, "value": value} for name, value in column.field.items()],
        }
        for column in columns
        if column.field
    ]
    return {"defaults": defaults, "overrides": overrides}


def _letter(number: int) -> str:
    return chr(ord("A") + number)
