"""Changes of a period's figures: each is one statement on one row, so that none is read and set back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Column, ColumnElement, Connection, Numeric, bindparam, case, cast
from sqlalchemy.sql.dml import ReturningUpdate

from gristmill_contracts.errors import InvariantError
from gristmill_ledger.budgets.decide import AMOUNT_MAX, Grant, passed
from gristmill_ledger.budgets.figures import read_thresholds
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.schema import budgets as tables

_period = tables.budget_period.c
_KEY: Final = (
    _period.budget == bindparam("of_budget"),
    _period.start_us == bindparam("of_start_us"),
)
# Numeric, for the sum of what was posted and held may pass 64 bits.
_LEFT: Final = (
    cast(_period.limit_amount, Numeric(40, 0))
    - _period.posted
    - _period.late_posted
    - _period.reserved
    - _period.suspense
)
_UPDATE: Final = tables.budget_period.update().where(*_KEY)
_RESERVE: Final = _UPDATE.where(bindparam("amount") <= _LEFT).values(
    reserved=_period.reserved + bindparam("amount")
)
_RESERVE_SOFT: Final = _UPDATE.values(reserved=_period.reserved + bindparam("amount"))


def _added(column: Column[int], name: str) -> ColumnElement[int]:
    """column + :name, held within 64 bits: usage is stored whatever it is, and so must this be."""
    delta = bindparam(name, type_=column.type)
    return case(
        (column > AMOUNT_MAX - delta, AMOUNT_MAX),
        else_=column + delta,
    )


def _fallen(column: Column[int], name: str) -> ColumnElement[int]:
    delta = bindparam(name, type_=column.type)
    return case((column < -AMOUNT_MAX - delta, -AMOUNT_MAX), else_=column + delta)


def _move(late_posted: ColumnElement[int]) -> ReturningUpdate[tuple[int, int, int]]:
    return _UPDATE.values(
        posted=_added(_period.posted, "posted"),
        late_posted=late_posted,
        reserved=_period.reserved + bindparam("reserved"),
        suspense=_period.suspense + bindparam("suspense"),
    ).returning(_period.posted, _period.late_posted, _period.limit_amount)


# Two statements, for a database may compute both arms of a CASE, and one of them overflows.
_MOVE: Final = _move(_added(_period.late_posted, "late_posted"))
_MOVE_LATE_DOWN: Final = _move(_fallen(_period.late_posted, "late_posted"))


@dataclass(slots=True, kw_only=True)
class Change:
    """What is added to the figures of one period. Below 0 takes away."""

    posted: int = 0
    late_posted: int = 0
    reserved: int = 0
    suspense: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A threshold that was passed for the first time under this limit."""

    budget: str
    start_us: int
    percent: int
    limit: int
    used: int


def try_reserve(connection: Connection, grants: Iterable[Grant]) -> bool:
    """Hold all of the grants or none of them, each only where that much is left. Budgets in id order."""
    held: list[Grant] = []
    for each in grants:
        statement = _RESERVE if each.figures.mode == "hard" else _RESERVE_SOFT
        parameters = _key(each.figures.budget, each.figures.start_us) | {"amount": each.amount}
        if each.amount and not connection.execute(statement, parameters).rowcount:
            for taken in held:
                move(connection, *_of(taken), Change(reserved=-taken.amount))
            return False
        held.append(each)
    return True


def move(
    connection: Connection, budget: str, start_us: int, change: Change
) -> tuple[int, int, int] | None:
    """Apply a change. Returns what is used before and after, and the limit; None = nothing changed."""
    if change == Change():
        return None
    late = max(-AMOUNT_MAX, min(AMOUNT_MAX, change.late_posted))
    posted = min(AMOUNT_MAX, change.posted)
    parameters = _key(budget, start_us) | {
        "posted": posted,
        "late_posted": late,
        "reserved": change.reserved,
        "suspense": change.suspense,
    }
    row = connection.execute(_MOVE_LATE_DOWN if late < 0 else _MOVE, parameters).one_or_none()
    if row is None:
        raise InvariantError(f"budget {budget} has no period that begins at {start_us}")
    used = row.posted + row.late_posted
    return used - posted - late, used, row.limit_amount


def move_all(
    connection: Connection,
    changes: dict[tuple[str, int], Change],
    thresholds: dict[str, str],
    now_us: int,
) -> list[Crossing]:
    """Apply changes by (budget, start of period), in that order, and record which thresholds they passed.

    thresholds: of each budget, as the column holds them.
    """
    crossings = []
    for (budget, start_us), change in sorted(changes.items()):
        moved = move(connection, budget, start_us, change)
        if moved is not None:
            percents = read_thresholds(thresholds.get(budget, ""))
            crossings += record_crossings(connection, (budget, start_us), moved, percents, now_us)
    return crossings


def record_crossings(
    connection: Connection,
    period: tuple[str, int],
    moved: tuple[int, int, int],
    thresholds: tuple[int, ...],
    now_us: int,
) -> list[Crossing]:
    """Put the thresholds on record that usage passed, once for each limit. Returns the new ones."""
    before, used, limit = moved
    budget, start_us = period
    return [
        Crossing(budget=budget, start_us=start_us, percent=percent, limit=limit, used=used)
        for percent in passed(before, used, limit, thresholds)
        if insert_or_skip(
            connection,
            tables.budget_crossing,
            budget=budget,
            start_us=start_us,
            percent=percent,
            limit_amount=limit,
            used=min(used, AMOUNT_MAX),
            at_us=now_us,
        )
    ]


def _key(budget: str, start_us: int) -> dict[str, object]:
    return {"of_budget": budget, "of_start_us": start_us}


def _of(each: Grant) -> tuple[str, int]:
    return each.figures.budget, each.figures.start_us
