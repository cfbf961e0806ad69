"""What meters say of their leases: still alive, or given back."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, select

from gristmill_contracts import limits
from gristmill_contracts.budgets import Renewed, ReturnLease
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.errors import FencedError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import Heartbeat
from gristmill_ledger import checks
from gristmill_ledger.budgets import holds
from gristmill_ledger.budgets.leases import read_versions
from gristmill_ledger.budgets.open_leases import renewed
from gristmill_ledger.producers import owning_attempt
from gristmill_ledger.schema import budgets as tables

_LEASE: Final = select(tables.budget_lease.c.session, tables.budget_lease.c.attempt).where(
    tables.budget_lease.c.id == bindparam("lease")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    renewed: Renewed
    resolved: list[holds.Resolved]


def check_return(message: ReturnLease) -> None:
    """Raise InvalidRequestError naming the first field that is out of bounds."""
    checks.text("session", message.session)
    checks.quantity("attempt", message.attempt)
    if len(message.keep) > limits.BUDGET_PAGE_MAX:
        raise InvalidRequestError(
            f"keep names {len(message.keep)} budgets; name at most {limits.BUDGET_PAGE_MAX}"
        )
    for budget, amount in message.keep.items():
        checks.text("keep budget", budget)
        checks.quantity(f"keep of {budget[:200]}", amount)


def give_back(connection: Connection, lease: str, message: ReturnLease, now_us: int) -> GivenBack:
    """Lower what a lease holds to `keep`, or end it. One that has ended stays so.

    Raises NotFoundError for a lease of another session, FencedError where a newer attempt owns it.
    """
    _check_owner(connection, lease, message.session, message.attempt)
    balances = holds.lock_leases(connection, [lease])
    resolved = holds.give_back(connection, balances, message.keep, now_us)
    return GivenBack(renewed=renewed(connection, [lease], now_us)[lease], resolved=resolved)


def renew_one(
    connection: Connection, lease: str, session: str, attempt: int, now_us: int
) -> Renewed:
    """Push its end out, if it is this attempt's own and has not ended. Raises as `give_back`."""
    _check_owner(connection, lease, session, attempt)
    holds.renew(connection, [lease], session, attempt, now_us)
    return renewed(connection, [lease], now_us)[lease]


def _check_owner(connection: Connection, lease: str, session: str, attempt: int) -> None:
    row = connection.execute(_LEASE, {"lease": lease}).one_or_none()
    if row is None or row.session != session:
        raise NotFoundError(f"session {session} has no lease {lease[:80]!r}; take one")
    newest = max(owning_attempt(connection, session) or 0, row.attempt)
    if attempt < newest:
        raise FencedError(
            f"attempt {attempt} of session {session} speaks of lease {lease}, but attempt {newest} owns "
            "the session; stop"
        )


def answer_leases(
    connection: Connection, heartbeats: Collection[Heartbeat], answer: HeartbeatAnswer, now_us: int
) -> None:
    """Renew the leases that the heartbeats name, and tell how long they may be spent."""
    versions = read_versions(connection, {beat.tenant for beat in heartbeats})
    answer.budgets = {
        beat.view.uid: versions[beat.tenant] for beat in heartbeats if beat.tenant in versions
    }
    for beat in sorted(heartbeats, key=lambda each: each.view.uid):
        if beat.leases and beat.view.uid not in answer.fenced:
            leases = beat.leases[: limits.BUDGET_PAGE_MAX]
            holds.renew(connection, leases, beat.view.uid, beat.view.attempt, now_us)
            answer.leases |= _own(connection, leases, beat.view.uid, now_us)


def _own(
    connection: Connection, leases: Collection[str], session: str, now_us: int
) -> dict[str, float]:
    of_session = select(tables.budget_lease.c.id).where(
        tables.budget_lease.c.session == session, tables.budget_lease.c.id.in_(sorted(leases))
    )
    own = list(connection.execute(of_session).scalars())
    found = renewed(connection, own, now_us)
    return {lease: each.expires_in_s for lease, each in found.items() if each.rest}
