"""What the books say of one session: by the ledger's usage API and by `gristmill usage`."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from gristmill_contracts.usage import TOKEN_TYPES

Tokens = dict[str, int]


@dataclass(frozen=True, slots=True)
class Books:
    """Both ways to read them. `cli` runs `gristmill` with these arguments and returns its output."""

    ledger_url: str
    cli: Callable[..., str]

    def rows(self, **parameters: str) -> list[dict[str, Any]]:
        """All rows of one question to GET /v1/usage, page by page."""
        rows: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            query = urllib.parse.urlencode({**parameters, **({"cursor": cursor} if cursor else {})})
            with urllib.request.urlopen(
                f"{self.ledger_url}/v1/usage?{query}", timeout=10
            ) as answer:
                page = json.load(answer)
            rows += page["rows"]
            cursor = page["next_cursor"]
            if cursor is None:
                return rows

    def usage(self, session: str) -> Tokens:
        """Billed tokens of a session by its name; zeros while the ledger knows of none."""
        return _tokens(
            row for row in self.rows(group_by="session") if row["session_name"] == session
        )

    def expect(self, session: str, tokens: Tokens, timeout_s: float = 30.0) -> None:
        """Wait until both ways say exactly these tokens. A ledger that is being restarted is waited for."""
        deadline = time.monotonic() + timeout_s
        found: Tokens | None = None
        while found != tokens:
            if time.monotonic() > deadline:
                raise AssertionError(f"{session} should cost {tokens}, the ledger says {found}")
            with suppress(OSError, HTTPException):
                found = self.usage(session)
            time.sleep(0.05)
        by_cli = self.usage_by_cli(session)
        if by_cli != tokens:
            raise AssertionError(
                f"the ledger says {tokens} for {session}, the command line {by_cli}"
            )

    def usage_by_cli(self, session: str) -> Tokens:
        rows = json.loads(self.cli("usage", "--group-by", "session", "--output", "json"))["rows"]
        return _tokens(row for row in rows if row["session_name"] == session)

    def expect_no_difference(self, session: str, timeout_s: float = 30.0) -> None:
        """Reconcile a session by its name: worker, meter and ledger say the same, to the token.

        What a meter held of budgets when it died is in suspense until it is there again: that is waited for.
        """
        (uid,) = {
            row["session"]
            for row in self.rows(group_by="session")
            if row["session_name"] == session
        }
        deadline = time.monotonic() + timeout_s
        while True:
            # It exits with 2 where something differs, and prints what.
            told = self.cli("reconcile", "--session", uid, "--output", "json", check=False)
            answer = json.loads(told)
            found = answer["differences"]
            if any(each["kind"] != "orphan_reservation" for each in found):
                raise AssertionError(f"{session} differs: {found}")
            if not found and answer["run"]["sessions"] == 1:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"{session} was not found equal: {answer}")
            time.sleep(0.1)

    def operations(self, session: str, kind: str = "usage", operation: str | None = None) -> int:
        """How many operations of a session the books hold: `usage` is billed, `attempt` is not."""
        rows = self.rows(group_by="session,operation", include_attempts="true")
        return sum(
            row["operations"]
            for row in rows
            if row["session_name"] == session
            and row["kind"] == kind
            and operation in {None, row["operation"]}
        )


def _tokens(rows: Any) -> Tokens:
    found = list(rows)
    return {name: sum(row[name] for row in found) for name in TOKEN_TYPES}
