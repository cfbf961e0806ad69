"""`usage` shows the ledger's rows as they are: all pages, exact integers, totals, unknown as unknown."""

import csv
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_cli.commands.usage import exact_decimal, totals
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.identity import session_uid
from gristmill_testing.cli import Commands

BIG = 2**62


def row(session: str, train: int | None, cost_pico: int | None, **fields: Any) -> dict[str, Any]:
    return {
        "session": session,
        "session_name": f"name-{session}",
        "prefill": 0,
        "cached_prefill": 0,
        "sample": 0,
        "train": train,
        "total": train,
        "operations": 1,
        "operations_unknown": 0,
        "operations_quarantined": 0,
        "cost_pico": cost_pico,
        "cost": None if cost_pico is None else exact_decimal(cost_pico),
        "cost_reason": None,
        **fields,
    }


ROWS = [row("a", 7, 7_000_000), row("b", BIG, 1), row("c", 5, 10**13)]


@contextmanager
def fake_ledger(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, list[str]]]]]:
    """Answers one row a page; remembers the questions."""
    asked: list[dict[str, list[str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            asked.append(query)
            if query.get("group_by") == ["nonsense"]:
                self._send(400, {"code": "invalid_request", "message": "group_by is 'nonsense'"})
                return
            at = int(query.get("cursor", ["0"])[0])
            following = str(at + 1) if at + 1 < len(rows) else None
            page = {"rows": rows[at : at + 1], "next_cursor": following}
            self._send(200, {**page, "currency": "USD", "price_book": "default"})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_json_holds_all_pages_and_their_totals(commands: Commands) -> None:
    with fake_ledger(ROWS) as (url, asked), commands.pretend_running(url):
        answer = commands.json("usage", "--group-by", "session")
    assert answer["rows"] == ROWS
    assert answer["totals"]["train"] == 7 + BIG + 5
    assert answer["totals"]["cost_pico"] == 7_000_000 + 1 + 10**13
    assert answer["totals"]["cost"] == "10.000007000001"
    assert [query.get("cursor") for query in asked] == [None, ["1"], ["2"]]


def test_csv_has_a_row_for_each_and_no_total(commands: Commands) -> None:
    with fake_ledger(ROWS) as (url, _), commands.pretend_running(url):
        text = commands.ok("usage", "--group-by", "session", "--output", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [each["train"] for each in rows] == ["7", str(BIG), "5"]
    assert rows[0]["session_name"] == "name-a"
    assert rows[0]["currency"] == "USD"


def test_the_table_ends_with_the_total(commands: Commands) -> None:
    with fake_ledger(ROWS) as (url, _), commands.pretend_running(url):
        lines = commands.ok("usage", "--group-by", "session").splitlines()
    assert lines[0].split()[:3] == ["SESSION_NAME", "SESSION", "PREFILL"]
    assert lines[-1].split()[0] == "TOTAL"
    assert f"{7 + BIG + 5:,}" in lines[-1]
    assert lines[-1].split()[-1] == "10.000007000001"


def test_unknown_is_never_shown_as_nothing(commands: Commands) -> None:
    unknown = row("u", None, None, cost_reason="the usage is unknown")
    with fake_ledger([*ROWS, unknown]) as (url, _), commands.pretend_running(url):
        result = commands.run("usage", "--group-by", "session")
        answer = commands.json("usage", "--group-by", "session")
    assert "unknown" in result.stdout.splitlines()[-1]
    assert "note: the usage is unknown" in result.stderr
    assert answer["totals"]["train"] is None
    assert answer["totals"]["cost"] is None


def test_the_question_reaches_the_ledger(commands: Commands) -> None:
    with fake_ledger(ROWS[:1]) as (url, asked), commands.pretend_running(url):
        commands.ok(
            "usage", "--tenant", "acme", "--bucket", "day", "--since", "2026-11-30", "--until", "2026-12-01",
            "--include-attempts", "--output", "json",
        )  # fmt: skip
    assert asked == [
        {
            "tenant": ["acme"], "bucket": ["day"], "since": ["2026-11-30"], "until": ["2026-12-01"],
            "include_attempts": ["true"],
        }
    ]  # fmt: skip


NAMED = """
apiVersion: gristmill.dev/v1alpha1
kind: TrainingSession
metadata: {name: run-1}
spec: {baseModelRef: {name: tiny}}
"""


def test_a_session_may_be_asked_for_by_its_name(commands: Commands) -> None:
    commands.ok("apply", "-f", "-", text=NAMED)
    uid = session_uid(commands.store.get(TrainingSession, "default", "run-1"))
    with fake_ledger(ROWS[:1]) as (url, asked), commands.pretend_running(url):
        for name in ("run-1", uid, "another"):
            commands.ok("usage", "--session", name)
        commands.ok("usage", "--session", "run-1", "--tenant", "bolt")
    assert [query["session"] for query in asked] == [[uid], [uid], ["another"], ["run-1"]]


def test_no_rows_are_said_in_words(commands: Commands) -> None:
    with fake_ledger([]) as (url, _), commands.pretend_running(url):
        assert "no usage is as asked for" in commands.run("usage").stderr


def test_what_the_ledger_refuses_is_said_in_its_words(commands: Commands) -> None:
    with fake_ledger(ROWS) as (url, _), commands.pretend_running(url):
        assert "group_by is 'nonsense'" in commands.refused("usage", "--group-by", "nonsense")


def test_a_ledger_that_is_away_is_said(commands: Commands) -> None:
    with commands.pretend_running("http://127.0.0.1:9"):
        assert "does not answer" in commands.refused("usage")


def test_usage_needs_a_running_instance(commands: Commands) -> None:
    assert "not running" in commands.refused("usage")


def test_no_rows_add_up_to_nothing() -> None:
    assert totals([])["cost"] == "0.000000"


@given(st.integers(0, 10**30))
def test_a_cost_is_shown_exactly(pico: int) -> None:
    shown = exact_decimal(pico)
    units, decimals = shown.split(".")
    assert int(units) * 10**12 + int(decimals.ljust(12, "0")) == pico


@pytest.mark.parametrize(
    ("pico", "text"), [(0, "0.000000"), (1, "0.000000000001"), (10**12, "1.000000")]
)
def test_six_decimals_are_shown_at_least(pico: int, text: str) -> None:
    assert exact_decimal(pico) == text
