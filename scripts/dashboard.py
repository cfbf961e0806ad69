"""The platform dashboard: rows of panels, and the Grafana JSON that they make. Written by `make chart`.

A panel's width is its share of a row. Money is not in here: it is read from the ledger, not from metrics.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gristmill_contracts import metrics as m

WIDTH: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
OURS: Final = '{job=~"$job"}'
"""What is added up is what our own scrape jobs told: somebody else may scrape the same processes."""
JOBS: Final = "(.+/)?gristmill-(operator|gateway|ledger|meters)"
"""Jobs as the Prometheus operator names those of the chart's monitors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str
    """As Grafana names it: short, s, bytes, reqps, percentunit."""
    queries: tuple[tuple[str, str], ...]
    """(PromQL, legend) of each line."""
    stat: bool = False
    """One number in place of a graph."""


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{OURS}[$__rate_interval]))"


def quantile(q: float, name: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{OURS}[$__rate_interval])))"
    )


def graph(title: str, unit: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title=title, unit=unit, queries=queries)


def number(title: str, unit: str, query: str) -> Panel:
    return Panel(title=title, unit=unit, queries=((query, ""),), stat=True)


ROWS: Final[Sequence[tuple[str, Sequence[Panel]]]] = (
    (
        "At a glance",
        (
            number("Running sessions", "short", f'max({m.OPERATOR_SESSIONS}{{state="Running"}})'),
            number("Oldest usage not in the ledger", "s", f"max({m.SPOOL_OLDEST_UNACKED_SECONDS})"),
            number("Gaps in usage, 24 h", "short", f"sum(increase({m.LEDGER_USAGE_GAPS}{OURS}[24h]))"),
            number("Operators that lead", "short", f"sum({m.OPERATOR_LEADER}{OURS})"),
        ),
    ),
    (
        "Sessions",
        (
            graph("Sessions by state", "short", (f"max by (state) ({m.OPERATOR_SESSIONS})", "{{state}}")),
            graph(
                "From creation to Running", "s",
                (quantile(0.5, m.OPERATOR_START_SECONDS), "p50"),
                (quantile(0.99, m.OPERATOR_START_SECONDS), "p99"),
            ),
            graph("Tokens a second", "short", (rate(m.METER_TOKENS, "token_type"), "{{token_type}}")),
        ),
    ),
    (
        "Tenants and models",
        (
            graph("Tokens a second by tenant", "short", (rate(m.METER_TOKENS, "tenant"), "{{tenant}}")),
            graph("Tokens a second by model", "short", (rate(m.METER_TOKENS, "model"), "{{model}}")),
            graph("Operations by outcome", "ops", (rate(m.METER_OPERATIONS, "outcome"), "{{outcome}}")),
        ),
    ),
    (
        "Gateway",
        (
            graph("Answers by status", "reqps", (rate(m.GATEWAY_REQUESTS, "status"), "{{status}}")),
            graph(
                "Time to an answer, p99", "s",
                (quantile(0.99, m.GATEWAY_REQUEST_SECONDS, "operation"), "{{operation}}"),
            ),
            graph("Open requests", "short", (f"sum({m.GATEWAY_OPEN_REQUESTS}{OURS})", "open")),
            graph("Bodies held", "bytes", (f"max({m.GATEWAY_HELD_BODY_BYTES})", "of one gateway")),
        ),
    ),
    (
        "Metering",
        (
            graph("Usage not acknowledged", "short", (f"sum({m.SPOOL_UNACKED_EVENTS}{OURS})", "events")),
            graph("Usage received", "ops", (rate(m.LEDGER_EVENTS, "result"), "{{result}}")),
            graph(
                "Ledger commits", "s",
                (quantile(0.5, m.LEDGER_COMMIT_SECONDS), "p50"),
                (quantile(0.99, m.LEDGER_COMMIT_SECONDS), "p99"),
            ),
            graph("Operations replayed", "ops", (rate(m.METER_REPLAYED_OPERATIONS), "replayed")),
        ),
    ),
    (
        "Operator",
        (
            graph(
                "Looks at objects", "ops",
                (rate(m.OPERATOR_RECONCILES, "kind, result"), "{{kind}} {{result}}"),
            ),
            graph("Time of a look, p99", "s", (quantile(0.99, m.OPERATOR_RECONCILE_SECONDS, "kind"), "{{kind}}")),
            graph(
                "Queue", "short",
                (f"max({m.OPERATOR_QUEUE_DEPTH})", "waiting"),
                (f"max({m.OPERATOR_QUEUE_AGE_SECONDS})", "oldest, s"),
            ),
            graph("Requests to the API server", "reqps", (rate(m.OPERATOR_API_REQUESTS, "verb, code"), "{{verb}} {{code}}")),
        ),
    ),
)  # fmt: skip


def expressions() -> Iterator[str]:
    for _, panels in ROWS:
        for panel in panels:
            yield from (query for query, _ in panel.queries)


def dashboard() -> str:
    made: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        height = HEIGHT // 2 if panels[0].stat else HEIGHT
        width = WIDTH // len(panels)
        for index, panel in enumerate(panels):
            place = {"x": index * width, "y": top + 1, "w": width, "h": height}
            made.append({"id": len(made) + 1, "gridPos": place, **_panel(panel)})
        top += 1 + height
    whole = {
        "uid": "gristmill-platform",
        "title": "Gristmill: platform",
        "tags": ["gristmill"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Source",
                },
                {
                    "name": "job",
                    "type": "textbox",
                    "query": JOBS,
                    "current": {"text": JOBS, "value": JOBS},
                    "label": "Scrape jobs",
                },
            ]
        },
        "panels": made,
    }
    return json.dumps(whole, indent=1) + "\n"


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend,
                "datasource": SOURCE,
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
