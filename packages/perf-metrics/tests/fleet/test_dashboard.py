"""The dashboard: by Grafana's own types, and with its queries on a real Prometheus."""

from __future__ import annotations

import enum
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from perf_metrics.monitoring.dashboard import grafana_dashboard
from perf_metrics.monitoring.rules import recording_and_alert_rules

from .live_fleet import ask, live_fleet, wait_for
from .prometheus_server import PrometheusServer

VARIANTS = [{}, {"cluster_label": "cluster"}]
CHOSEN = {"$job": "a", "$host": ".*", "$cluster": ".*"}
"""What Grafana puts in, with one job chosen and all hosts and clusters."""


@pytest.fixture(params=VARIANTS, ids=["plain", "clusters"])
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    # As Grafana gets it.
    return json.loads(json.dumps(grafana_dashboard(**request.param)))


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target


# By Grafana's types.


def test_grafanas_types_lose_and_change_nothing(dashboard) -> None:
    """A name that they do not know would not come back."""
    register_default_plugins()
    read = Dashboard.from_json(dashboard)
    back = json.loads(json.dumps(read, cls=JSONEncoder))
    assert list(differences(dashboard, back, "")) == []
    assert list(outside_of_enumerations(read, "dashboard")) == []


def test_a_name_that_grafana_does_not_know_would_be_found(dashboard) -> None:
    register_default_plugins()
    panel = panels(dashboard)[-1]
    panel["options"]["sortedBy"] = panel["fieldConfig"]["unit"] = "x"
    panel["targets"][0]["expression"] = "x"
    dashboard["schemaversion"] = 39
    series = next(panel for panel in panels(dashboard) if panel["type"] == "timeseries")
    series["options"]["legend"]["displayMode"] = "lists"
    read = Dashboard.from_json(dashboard)
    lost = list(differences(dashboard, json.loads(json.dumps(read, cls=JSONEncoder)), ""))
    assert len(lost) == 4
    assert len(list(outside_of_enumerations(read, "dashboard"))) == 1


def differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """What of ours is not in theirs; theirs may have more, as it writes defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            # It leaves out null.
            if value is not None or theirs.get(key) is not None:
                yield from differences(value, theirs.get(key), f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{path}[{place}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} came back as {theirs!r}"


def outside_of_enumerations(thing: object, path: str) -> Iterator[str]:
    """Values of Grafana's objects that are none of those which their types list."""
    if isinstance(thing, list):
        for place, part in enumerate(thing):
            yield from outside_of_enumerations(part, f"{path}[{place}]")
    if not type(thing).__module__.startswith("grafana_foundation_sdk.models") or isinstance(thing, enum.Enum):
        return
    hints = typing.get_type_hints(type(thing))
    for name, value in vars(thing).items():
        yield from outside_of_enumerations(value, f"{path}.{name}")
        kinds = [
            kind
            for kind in (hints[name], *typing.get_args(hints[name]))
            if isinstance(kind, type) and issubclass(kind, enum.Enum)
        ]
        if kinds and isinstance(value, str | int) and not any(value in list(kind) for kind in kinds):
            yield f"{path}.{name}: {value!r}"


def test_panels_are_of_present_types_and_do_not_overlap(dashboard) -> None:
    kinds = {panel["type"] for panel in dashboard["panels"]}
    assert kinds == {"row", "timeseries", "stat", "table", "bargauge", "xychart"}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_it_can_be_imported_beside_others_and_again(dashboard) -> None:
    assert dashboard["id"] is None
    assert dashboard["uid"] == "perf-metrics-ofu"
    assert {str(panel["datasource"]) for panel in panels(dashboard)} == {
        str({"type": "prometheus", "uid": "${datasource}"})
    }


def test_every_variable_in_use_is_there(dashboard) -> None:
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)", json.dumps(dashboard)))
    assert used == names
    assert ("cluster" in names) == ("cluster" in json.dumps(dashboard))


def test_columns_of_a_table_are_named(dashboard) -> None:
    for panel in panels(dashboard):
        if "transformations" not in panel:
            continue
        organize = panel["transformations"][1]["options"]
        numbers = [f"Value #{target['refId']}" for target in panel["targets"]]
        assert set(numbers) < set(organize["renameByName"])
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["options"] in organize["renameByName"].values()


def test_labels_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="job_label='hpc-job' is not the name of a label"):
        grafana_dashboard(job_label="hpc-job")


# On a real server, with the rules.


@pytest.fixture(scope="module", params=VARIANTS, ids=["plain", "clusters"])
def served(
    request: pytest.FixtureRequest, prometheus_binaries: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PrometheusServer, dict[str, Any]]]:
    """A server that has scraped a fleet and evaluated the rules, and its dashboard."""
    folder = tmp_path_factory.mktemp("fleet")
    rules = recording_and_alert_rules(interval_s=1, **request.param)
    labels = {"cluster": "west"} if request.param else {}
    with live_fleet(folder, rules, labels) as server:
        # The last one that is recorded.
        wait_for(server, "job:mfu_minus_ofu:ratio_avg1h", {"a": "0.25"})
        wait_for(server, "count by (hpc_job) (rate(training_device_seconds_total[15m]) > 0)", {"a": "2"})
        yield server, grafana_dashboard(**request.param)


def put_in(text: str) -> str:
    for name, value in CHOSEN.items():
        text = text.replace(name, value)
    assert "$" not in text
    return text


def test_every_query_gives_data(served) -> None:
    server, dashboard = served
    empty = [
        f"{title}: {target['expr']}"
        for title, target in expressions(dashboard)
        if not ask(server, "query", query=put_in(target["expr"]))["result"]
    ]
    assert empty == []


def test_the_labels_of_legends_and_columns_are_there(served) -> None:
    server, dashboard = served
    for panel in panels(dashboard):
        for target in panel["targets"]:
            result = ask(server, "query", query=put_in(target["expr"]))["result"]
            labels = set().union(*(series["metric"] for series in result))
            shown = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            if "transformations" in panel:
                # Else tables of several queries would not be joined.
                assert "__name__" not in labels
                named = panel["transformations"][1]["options"]["renameByName"]
                shown = {name for name in named if not name.startswith("Value #")}
            # A whole GPU has none of these.
            assert shown - labels <= {"GPU_I_ID"}, target["expr"]


def test_every_variable_has_values(served) -> None:
    server, dashboard = served
    found = {}
    for variable in dashboard["templating"]["list"][1:]:
        matched = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        assert matched is not None
        selector, label = matched.groups()
        found[variable["name"]] = ask(server, f"label/{label}/values", **{"match[]": put_in(selector)})
    clusters = {"cluster": ["west"]} if "cluster" in found else {}
    assert found == {**clusters, "job": ["a", "b"], "host": ["node0"]}


def test_the_figures_of_the_fleet_are_those_of_its_counters(served) -> None:
    server, dashboard = served
    shown = {
        panel["title"]: [
            float(series["value"][1])
            for target in panel["targets"]
            for series in ask(server, "query", query=put_in(target["expr"]))["result"]
        ]
        for panel in panels(dashboard)
    }
    assert shown["OFU of GPUs in jobs"] == [pytest.approx((0.25 + 0.25 + 0.75) / 3)]
    assert shown["OFU of all GPUs"] == [pytest.approx((0.25 + 0.25 + 0.75) / 4)]
    assert (shown["GPUs"], shown["Jobs with GPUs"]) == ([4], [2])
    assert sorted(shown["GPUs in use"]) == [1, 3]  # and none that is idle in a job
    parts = shown["What the time of job $job is spent on"]
    assert sum(parts) == pytest.approx(1)
    assert 0 < shown["Goodput of job $job"][0] < 1
    assert shown["Jobs with the lowest OFU"] == [0.25, 0.75]
    assert shown["MFU and OFU of job $job"] == [0.25, 0.5]
    assert shown["MFU / OFU of job $job"] == [2]
    assert shown["OFU of each device of job $job"] == [0.25, 0.25]
    assert sorted(shown["SM clock of each device of job $job"]) == [915, 1830]
