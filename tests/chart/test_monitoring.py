"""Alerts, monitors and the dashboard: every name in them exists, every alert has its page."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml

from gristmill_contracts import labels, metric_shapes, metrics
from gristmill_contracts.session import State
from gristmill_ledger.metrics import Metrics as LedgerMetrics
from gristmill_operator.workers import Result
from gristmill_testing.chart import CHART, ROOT, find, kinds, render

ON: dict[str, Any] = {
    "monitoring.rules.enabled": True,
    "monitoring.serviceMonitor.enabled": True,
    "monitoring.dashboard.enabled": True,
}
RUNBOOKS = ROOT / "docs/runbooks"
NAMES = {v for k, v in vars(metrics).items() if k.isupper() and isinstance(v, str)}
TOLD_BY_EACH_REPLICA = {
    metrics.BUDGET_LIMIT, metrics.BUDGET_POSTED, metrics.BUDGET_RESERVED, metrics.RATED_COST,
    metrics.LEDGER_UNRATED_EVENTS, metrics.LEDGER_PRODUCERS, metrics.CHAIN_UNVERIFIED_ROWS,
    metrics.OPERATOR_SESSIONS, metrics.OPERATOR_CACHED_OBJECTS,
}  # fmt: skip
"""Gauges of what is stored, or watched: every replica tells all of it."""
PROMQL = {
    "sum", "max", "min", "rate", "increase", "delta", "by", "absent", "histogram_quantile", "and", "le",
}  # fmt: skip


def alerts() -> list[dict[str, Any]]:
    return list(yaml.safe_load((CHART / "files/alerts.yaml").read_text()))


def board() -> dict[str, Any]:
    text = find(render(ON), "ConfigMap", "gristmill-dashboard")["data"]["gristmill-platform.json"]
    return dict(json.loads(text))


def board_queries() -> Iterator[str]:
    for panel in board()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))


def unknown_metrics(query: str) -> set[str]:
    """Words of a query that are neither PromQL's, nor a label in braces or behind `by`, nor a metric of ours."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", "", query)
    words = set(re.findall(r"[a-z_]{2,}", bare)) - PROMQL
    return {
        word for word in words if re.sub(r"_(bucket|sum|count)$", "", word) not in NAMES
    } - NAMES


def test_an_unknown_metric_would_be_seen() -> None:
    assert unknown_metrics("max(gristmill_nothing) > 3") == {"gristmill_nothing"}


def test_alerts_name_metrics_that_exist() -> None:
    assert {
        each["alert"]: found for each in alerts() if (found := unknown_metrics(each["expr"]))
    } == {}


def test_the_dashboard_names_metrics_that_exist() -> None:
    queries = list(board_queries())
    assert len(queries) > 20
    assert {query: found for query in queries if (found := unknown_metrics(query))} == {}


def labels_in_docs() -> dict[str, set[str]]:
    """Metric -> its labels, of the generated reference page."""
    rows = re.findall(
        r"^\| `(gristmill_\w+)` \| \w+ \| ([^|]*)\|",
        (ROOT / "docs/reference/metrics.md").read_text(),
        re.MULTILINE,
    )
    return {name: set(re.findall(r"`(\w+)`", listed)) for name, listed in rows}


def wrong_labels(query: str, known: dict[str, set[str]]) -> set[str]:
    """Labels that a query selects or groups by, and that no metric of that place has."""
    wrong = set()
    for name, selected in re.findall(r"(gristmill_\w+)\{([^}]*)\}", query):
        wrong |= set(re.findall(r"(\w+)(?:=~|=|!=)", selected)) - known.get(name, set()) - {"job"}
    grouped = {
        w for group in re.findall(r"by \(([^)]*)\)", query) for w in re.findall(r"\w+", group)
    }
    bases = [re.sub(r"_bucket$", "", name) for name in re.findall(r"gristmill_\w+", query)]
    return wrong | grouped - {"le"} - set().union(*(known.get(base, set()) for base in bases))


def test_queries_use_labels_that_their_metric_has() -> None:
    known = labels_in_docs()
    queries = [*board_queries(), *(each["expr"] for each in alerts())]
    assert {query: found for query in queries if (found := wrong_labels(query, known))} == {}
    assert wrong_labels('gristmill_spool_bytes{session="x"}', known) == {"session"}


def test_alerts_on_results_name_those_that_the_operator_tells() -> None:
    told = set(get_args(Result))
    found = [
        (each["alert"], word)
        for each in alerts()
        for words in re.findall(rf'{metrics.OPERATOR_RECONCILES}{{result=~?"([^"]*)"', each["expr"])
        for word in words.split("|")
    ]
    assert found
    assert [each for each in found if each[1] not in told] == []


def test_alerts_select_values_that_the_label_can_have() -> None:
    events = LedgerMetrics().events.collect()
    stored = {sample.labels["result"] for family in events for sample in family.samples}
    known = {"result": {*get_args(Result), *stored}, "state": set(get_args(State))}
    selected = [
        (label, value)
        for each in alerts()
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', each["expr"])
        if label in known
        for value in values.split("|")
    ]
    assert len(selected) >= 3
    assert [(label, value) for label, value in selected if value not in known[label]] == []


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    names = {each["alert"] for each in alerts()}
    assert len(names) == len(alerts())
    assert {path.stem for path in RUNBOOKS.glob("Gristmill*.md")} == names


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_a_page_says_what_it_means_and_what_to_do(alert: dict[str, Any]) -> None:
    page = (RUNBOOKS / f"{alert['alert']}.md").read_text()
    assert page.startswith(
        f"# {alert['alert']}\n\n**{alert['summary']}.** Severity: {alert['severity']}."
    )
    assert "\n## What it means\n" in page
    assert len(page.partition("\n## What to do\n")[2].strip()) > 60


def test_the_index_lists_every_alert() -> None:
    index = (RUNBOOKS / "README.md").read_text()
    for each in alerts():
        name, severity = each["alert"], each["severity"]
        assert f"| [{name}]({name}.md) | {severity} | {each['summary']} |" in index


def test_rules_link_to_where_the_runbooks_are_served() -> None:
    values = {**ON, "monitoring.rules.runbookURL": "https://docs.example.com/runbooks"}
    (group,) = find(render(values), "PrometheusRule", "gristmill")["spec"]["groups"]
    assert len(group["rules"]) == len(alerts())
    for rule in group["rules"]:
        link = rule["annotations"]["runbook_url"]
        assert link == f"https://docs.example.com/runbooks/{rule['alert']}.md"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_process_is_scraped_at_the_port_that_it_has() -> None:
    objects = render({**ON, "monitoring.serviceMonitor.labels": {"release": "prometheus"}})
    for component in ("operator", "gateway", "ledger"):
        monitor = find(objects, "ServiceMonitor", f"gristmill-{component}")
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        service = find(objects, "Service", f"gristmill-{component}")
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        assert wanted <= service["metadata"]["labels"].items()
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_meters_are_scraped_in_all_namespaces() -> None:
    spec = find(render(ON), "PodMonitor", "gristmill-meters")["spec"]
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["selector"]["matchLabels"] == {labels.MANAGED_BY: "gristmill", labels.RANK: "0"}
    assert spec["podMetricsEndpoints"][0]["port"] == "meter"


def doubled(query: str) -> list[str]:
    """Metrics of a query that would count twice what another job scrapes too, or another replica tells."""
    if "sum" not in query:
        return []
    selectors = re.findall(r"(gristmill_\w+)({[^}]*})?", query)
    return [
        name
        for name, selected in selectors
        if 'job=~"$job"' not in selected or name in TOLD_BY_EACH_REPLICA
    ]


def test_f66_a_second_scraper_or_replica_changes_no_panel() -> None:
    (variable,) = [each for each in board()["templating"]["list"] if each["name"] == "job"]
    assert variable["query"] == variable["current"]["value"]
    jobs = re.compile(variable["query"])
    objects = render(ON)
    monitors = [each for each in objects if each["kind"] in ("ServiceMonitor", "PodMonitor")]
    assert len(monitors) == 4
    for monitor in monitors:
        names = monitor["metadata"]
        of_pods = f"{names['namespace']}/{names['name']}"
        # What the Prometheus operator calls them: a Service by its name, pods by their monitor's.
        assert jobs.fullmatch(of_pods if monitor["kind"] == "PodMonitor" else names["name"])
    for other in ("kubernetes-pods", "my-gristmill-exporter", "gristmill-metrics", "ledger"):
        assert not jobs.fullmatch(other)
    assert {query: found for query in board_queries() if (found := doubled(query))} == {}
    assert doubled("sum(gristmill_spool_unacked_events)") == [metrics.SPOOL_UNACKED_EVENTS]
    assert doubled('sum(gristmill_budget_posted{job=~"$job"})') == [metrics.BUDGET_POSTED]


def test_f66_no_two_kinds_of_processes_tell_the_same_name() -> None:
    told = [name for shapes in metric_shapes.SHAPES.values() for name in shapes]
    twice = {name for name in told if told.count(name) > 1}
    assert twice == {metrics.LABEL_OVERFLOW}
    queries = [*board_queries(), *(each["expr"] for each in alerts())]
    assert not [query for query in queries if metrics.LABEL_OVERFLOW in query and "sum" in query]


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"]


def test_nothing_of_it_is_there_unless_asked_for() -> None:
    names = kinds(render())
    assert not [
        each for each in names if each[0] in ("PrometheusRule", "ServiceMonitor", "PodMonitor")
    ]
    assert ("ConfigMap", "gristmill-dashboard") not in names
