"""Runs, differences and decisions as facts: a difference is open until a decision on it is recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, func, select

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError
from gristmill_ledger import checks
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.reconcile.compare import Difference
from gristmill_ledger.reconcile.sources import Scope, hold_subject
from gristmill_ledger.registry import require_found
from gristmill_ledger.schema import budgets
from gristmill_ledger.schema import reconcile as tables

OURSELVES: Final = "ledger"
"""Who decided on a hold that came to its end."""

FIGURE_MAX: Final = limits.RESOURCE_INTEGER_MAX
"""Tokens of a difference are kept up to this: sums of them stay exact."""

_run, _diff, _decision = tables.recon_run.c, tables.recon_diff.c, tables.recon_decision.c
_hold = budgets.reservation_resolution.c
_WITH_DECISION: Final = (
    select(tables.recon_diff, _decision.decided_by, _decision.reason, _decision.at_us)
    .outerjoin(tables.recon_decision, _decision.diff == _diff.id)
    .order_by(_diff.found_us, _diff.id)
)
_TOKENS: Final = (
    func.abs(_diff.prefill)
    + func.abs(_diff.cached_prefill)
    + func.abs(_diff.sample)
    + func.abs(_diff.train)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A look at everything in a scope."""

    id: str
    slot: str
    scope: str
    asked_by: str
    started_us: int
    ended_us: int
    sessions: int
    """Compared, in both pairs."""
    in_flight: int
    """Whose usage the ledger has not come to yet: compared by a later run."""
    silent: int
    """Whose meter tells nothing to compare."""
    differences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a run that was recorded brought."""

    new: list[Difference]
    ended_holds: int
    """Open differences of holds that have come to an end since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSum:
    """Open differences of one pair and kind."""

    pair: str
    kind: str
    differences: int
    tokens: int
    oldest_us: int


def slot_is_taken(connection: Connection, slot: str) -> bool:
    found = connection.execute(select(_run.id).where(_run.slot == slot)).scalar_one_or_none()
    return found is not None


def record(
    connection: Connection, run: Run, found: Sequence[Difference], now_us: int
) -> Recorded | None:
    """Keep a run and what it found; None where somebody recorded the same slot before: nothing is kept."""
    fields = {name: getattr(run, name) for name in Run.__slots__}
    if not insert_or_skip(connection, tables.recon_run, **fields):
        return None
    new = [
        each for each in found if insert_or_skip(connection, tables.recon_diff, **_row(each, run))
    ]
    return Recorded(new=new, ended_holds=_end_holds(connection, now_us))


def _row(found: Difference, run: Run) -> dict[str, object]:
    prefill, cached_prefill, sample, train = (
        max(-FIGURE_MAX, min(FIGURE_MAX, each)) for each in found.delta.tokens
    )
    return {
        "id": found.id,
        "run": run.id,
        "pair": found.pair,
        "kind": found.kind,
        "tenant": found.tenant,
        "session": found.session,
        "subject": found.subject,
        "operations": found.delta.operations,
        "prefill": prefill,
        "cached_prefill": cached_prefill,
        "sample": sample,
        "train": train,
        "amount": found.amount,
        "detail": found.detail,
        "found_us": run.ended_us,
    }


def _end_holds(connection: Connection, now_us: int) -> int:
    """A hold that was resolved is no orphan any more, and its resolution says why: that is the decision."""
    ended = 0
    query = _WITH_DECISION.where(_diff.kind == "orphan_reservation", _decision.diff.is_(None))
    waiting = {row.subject: row.id for row in connection.execute(query)}
    for subject, diff in waiting.items():
        _, lease, _, budget = subject.split(" ", 3)
        row = connection.execute(
            select(budgets.reservation_resolution).where(
                _hold.lease == lease, _hold.budget == budget
            )
        ).one_or_none()
        if row is not None and hold_subject(row.lease, row.budget) == subject:
            ended += _decide(
                connection,
                diff,
                row.decided_by or OURSELVES,
                f"the hold ended: {row.reason}",
                now_us,
            )
    return ended


def decide(connection: Connection, diff: str, *, by: str, reason: str, now_us: int) -> None:
    """Record why a difference is settled. The same decision again changes nothing.

    Raises NotFoundError, or ConflictError where another decision is on record.
    """
    checks.text("reason", reason)
    checks.text("by", by)
    row = require_found(
        connection.execute(_WITH_DECISION.where(_diff.id == diff)).one_or_none(),
        f"difference {diff[:80]!r}",
    )
    if not _decide(connection, diff, by, reason, now_us):
        decided = connection.execute(_WITH_DECISION.where(_diff.id == row.id)).one()
        if (decided.decided_by, decided.reason) != (by, reason):
            raise ConflictError(
                f"difference {diff} was decided by {decided.decided_by}: {decided.reason}; that is final"
            )


def _decide(connection: Connection, diff: str, by: str, reason: str, now_us: int) -> bool:
    return insert_or_skip(
        connection, tables.recon_decision, diff=diff, decided_by=by, reason=reason, at_us=now_us
    )


def listed(
    connection: Connection, scope: Scope, *, after: str = "", limit: int, all_of_them: bool = False
) -> list[Row[Any]]:  # Any: column values
    """Differences in a scope, oldest first, with their decisions; only open ones unless all are wanted."""
    query: Select[Any] = _WITH_DECISION.limit(limit)
    if not all_of_them:
        query = query.where(_decision.diff.is_(None))
    if scope.tenant:
        query = query.where(_diff.tenant == scope.tenant)
    if scope.session:
        query = query.where(_diff.session == scope.session)
    if after:
        row = require_found(
            connection.execute(select(_diff.found_us).where(_diff.id == after)).one_or_none(),
            f"difference {after[:80]!r}",
        )
        later = _diff.found_us > row.found_us
        query = query.where(later | ((_diff.found_us == row.found_us) & (_diff.id > after)))
    return list(connection.execute(query))


def open_sums(connection: Connection) -> list[OpenSum]:
    """What is open, for the metrics."""
    query = (
        select(
            _diff.pair,
            _diff.kind,
            func.count().label("differences"),
            func.sum(_TOKENS).label("tokens"),
            func.min(_diff.found_us).label("oldest_us"),
        )
        .outerjoin(tables.recon_decision, _decision.diff == _diff.id)
        .where(_decision.diff.is_(None))
        .group_by(_diff.pair, _diff.kind)
    )
    return [
        OpenSum(
            pair=row.pair,
            kind=row.kind,
            differences=row.differences,
            tokens=int(row.tokens),
            oldest_us=row.oldest_us,
        )
        for row in connection.execute(query)
    ]


def newest_run_us(connection: Connection) -> int | None:
    """When the newest look at everything ended; None = there was none."""
    found: int | None = connection.execute(
        select(func.max(_run.ended_us)).where(_run.scope == Scope().text)
    ).scalar_one()
    return found
