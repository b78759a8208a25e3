"""The Grafana dashboard asks for what the daemon shows, and for nothing else."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mrl.exchange.metrics import ExchangeCollector
from tests.support.stored_core import StoredCore

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana" / "exchange.json"
NAME = re.compile(r"mrl_exchange_\w+")
COUNTED = re.compile(r"(?:rate|increase)\(\s*(mrl_exchange_\w+)")
LABELS = re.compile(r"by \(([^)]*)\)")
GROUPS = {"row", "stat", "timeseries", "state-timeline"}


@pytest.fixture(scope="module")
def dashboard():
    """The file's content."""
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shown():
    """(name, type) of every metric that a daemon shows."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ExchangeCollector(StoredCore().stat(0.0), lambda: 0.0))
    text = generate_latest(registry).decode()
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in text_string_to_metric_families(text)
    }


def expressions(dashboard):
    """Every question that the dashboard asks Prometheus."""
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    return asked + [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


def test_every_metric_of_the_dashboard_exists(dashboard, shown):
    """And most of what there is to see is on it."""
    asked = {name for expression in expressions(dashboard) for name in NAME.findall(expression)}
    assert asked - set(shown) == set()
    assert len(asked) >= 25


def test_counters_are_asked_for_rates_and_gauges_are_not(dashboard, shown):
    """The rate of a gauge, and the sum of a counter that restarts at 0, mean nothing."""
    for expression in expressions(dashboard):
        rated = set(COUNTED.findall(expression))
        assert rated == {name for name in NAME.findall(expression) if name.endswith("_total")}, expression
        assert {shown[name] for name in rated} <= {"counter"}


def test_every_legend_names_labels_that_are_left(dashboard):
    """What a sum leaves out shows as nothing."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            left = {label.strip() for group in LABELS.findall(target["expr"]) for label in group.split(",")}
            assert wanted <= left, panel["title"]


def test_panels_have_their_own_ids_places_units_and_words(dashboard):
    """None lies on another, and each says what it shows."""
    panels = dashboard["panels"]
    assert {panel["type"] for panel in panels} == GROUPS
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    taken = Counter(cell for panel in panels for cell in cells(panel["gridPos"]))
    assert max(taken.values()) == 1
    assert max(x for x, _ in taken) < 24
    for panel in panels:
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
        if panel["type"] == "timeseries":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def cells(place):
    """The cells of Grafana's grid that a panel takes."""
    return [
        (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
    ]


def test_it_works_with_any_prometheus_source_and_any_number_of_daemons(dashboard):
    """Source and daemon are chosen above the panels; every question keeps to the daemons that were chosen."""
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "instance"]
    assert "__inputs" not in dashboard
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            num_metrics = len(NAME.findall(target["expr"]))
            assert target["expr"].count('{instance=~"$instance"}') == num_metrics, panel["title"]
