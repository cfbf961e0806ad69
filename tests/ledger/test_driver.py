"""What goes straight to the driver stores and reads what a statement of SQLAlchemy's would."""

from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from gristmill_contracts.chain import encoding
from gristmill_contracts.errors import UnavailableError
from gristmill_ledger import schema
from gristmill_ledger.budgets import holds
from gristmill_ledger.chain.pages import rows_after
from gristmill_ledger.database import Database
from gristmill_ledger.driver import COPY_ROWS_MIN, change_all, insert_all, raw_rows
from gristmill_ledger.lists import among
from gristmill_ledger.schema import budgets as tables
from gristmill_testing.falsified import fill_chain
from gristmill_testing.ledger_store import stored_rows

MANY = COPY_ROWS_MIN + 3
ODD = "a\tb\\N\nc\"'ü\\."
"""What a careless COPY would break at."""


def lease(n: int) -> dict[str, Any]:
    return {
        "id": f"l-{n}",
        "tenant": ODD,
        "session": "",
        "attempt": 2**63 - 1,
        "seq": n,
        "key": "\\N",
        "model": "tiny",
        "prices": bytes(range(256)),
        "taken_us": 0,
        "usable_until_us": -(2**62),
    }


def balance(n: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "lease": f"l-{n}",
        "budget": "acme/all",
        "start_us": 0,
        "session": "s-1",
        "attempt": 1,
        "posted": 0,
        "rest": 100,
        "expires_us": 7,
        "suspended": 0,
        "unknown_usage": 0,
    }
    return fields | changes


@pytest.mark.parametrize("count", [0, 1, COPY_ROWS_MIN - 1, COPY_ROWS_MIN, MANY])
def test_rows_are_stored_as_they_are(database: Database, count: int) -> None:
    rows = [lease(n) for n in range(count)]
    database.write_now(lambda c: insert_all(c, tables.budget_lease, rows))
    assert stored_rows(database, "budget_lease") == rows


def test_nothing_is_null_and_stays_null(database: Database) -> None:
    limits = [
        {"budget": f"acme/{n}", "n": 1, "amount": None if n % 2 else n, "mode": "hard",
         "thresholds": "", "set_us": 1, "set_by": ""}
        for n in range(MANY)
    ]  # fmt: skip
    database.write_now(lambda c: insert_all(c, tables.budget_limit, limits))
    found = [row["amount"] for row in stored_rows(database, "budget_limit")]
    assert found == [None if n % 2 else n for n in range(MANY)]


def test_a_row_that_is_there_refuses_all(database: Database) -> None:
    rows = [lease(n) for n in range(MANY)]
    database.write_now(lambda c: insert_all(c, tables.budget_lease, rows[:1]))
    with pytest.raises(IntegrityError):
        database.write_now(lambda c: insert_all(c, tables.budget_lease, rows))
    assert stored_rows(database, "budget_lease") == rows[:1]
    database.write_now(lambda c: insert_all(c, tables.budget_lease, rows[1:]))
    assert stored_rows(database, "budget_lease") == rows


@pytest.mark.parametrize("count", [1, 2, MANY])
def test_each_row_is_changed_by_its_own_values_and_no_other(database: Database, count: int) -> None:
    rows = [balance(n) for n in range(MANY + 1)]
    database.write_now(lambda c: insert_all(c, tables.reservation_balance, rows))
    told = [
        {"of_lease": f"l-{n}", "of_budget": "acme/all", "posted": n, "rest": 2**62 + n,
         "suspended": n % 2, "unknown_usage": (n + 1) % 2}
        for n in range(count)
    ]  # fmt: skip
    database.write_now(lambda c: change_all(c, holds._SAVE, holds._SAVE_ALL, told))
    expected = [
        balance(n, posted=n, rest=2**62 + n, suspended=n % 2, unknown_usage=(n + 1) % 2)
        for n in range(count)
    ]
    assert stored_rows(database, "reservation_balance") == expected + rows[count:]
    ended = [{"of_lease": f"l-{n}", "of_budget": "acme/all"} for n in range(count)]
    ended[-1]["of_budget"] = "acme/another"
    database.write_now(lambda c: change_all(c, holds._DROP, holds._DROP_ALL, ended))
    assert stored_rows(database, "reservation_balance") == expected[-1:] + rows[count:]


def test_rows_are_read_as_sqlalchemy_reads_them(database: Database) -> None:
    fill_chain(database)
    columns = [schema.usage_event.c[name] for name in encoding.COLUMNS]
    query = select(*columns).order_by(schema.usage_event.c.seq)
    expected = database.read_now(lambda c: [tuple(row) for row in c.execute(query)])
    found = database.read_now(lambda c: list(rows_after(c, "acme", 0, 100, 100)))
    assert found == expected
    kinds = [[type(value) for value in row] for row in found]
    assert kinds == [[type(value) for value in row] for row in expected]
    assert database.read_now(lambda c: rows_after(c, "acme", 2, 7, 3)) == expected[2:5]


def test_an_error_of_the_driver_is_one_of_sqlalchemys(database: Database) -> None:
    with pytest.raises((DBAPIError, UnavailableError)):
        database.read_now(lambda c: raw_rows(c, "SELECT nothing FROM nowhere", ()))


WORDS = ["", "a", "a,b", "{}", '"', "\\", '\\"', "NULL", "null", " a ", "\n\t", "'", "ü", "a\\\\b"]


def test_any_text_may_be_in_a_list(database: Database) -> None:
    rows = [lease(n) | {"id": word} for n, word in enumerate(WORDS)]
    database.write_now(lambda c: insert_all(c, tables.budget_lease, rows))
    query = select(tables.budget_lease.c.id).where(among(tables.budget_lease.c.id, "ids"))
    for words in ([], WORDS[:1], ["nobody", *WORDS], *([word] for word in WORDS)):
        found = database.read_now(partial(_ids, query, words))
        assert sorted(found) == sorted(word for word in words if word != "nobody")


def _ids(query: Any, words: list[str], connection: Connection) -> list[str]:
    return list(connection.execute(query, {"ids": words}).scalars())


def test_a_list_is_looked_up_and_not_compared_row_by_row(database: Database) -> None:
    query = select(tables.budget_lease.c.key).where(among(tables.budget_lease.c.id, "ids"))
    statement = str(query.compile(dialect=database.engine.dialect))
    if database.engine.dialect.name == "postgresql":
        # A text that is cast would be read anew for each row.
        assert statement.endswith("= ANY (%(ids)s::TEXT[])")
        return
    with database.engine.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", ('["l-1"]',)).all()
    assert any("SEARCH budget_lease USING INDEX" in row.detail for row in plan), plan
