"""What a session waits for somebody to do; and what becomes of one whose tenant is gone."""

from gristmill_contracts import conditions, limits
from gristmill_contracts.conditions import condition
from gristmill_contracts.errors import BudgetExhaustedError
from gristmill_contracts.http import SessionView
from gristmill_contracts.resources import Condition
from gristmill_sessions.attempts import cluster_of, is_started, seconds_us
from gristmill_sessions.observed import Observed, Plan


def tenant_deleted(observed: Observed) -> Plan | None:
    """A tenant that does not come back takes its sessions with it. One that is made again finds them alive."""
    if not is_started(observed):
        return None
    tenant = cluster_of(observed).tenant
    due_us = tenant_due_us(observed)
    overdue = due_us is not None and observed.now_us >= due_us
    if not tenant.terminating and (tenant.found or not overdue):
        return None
    message = f"the tenant of namespace {observed.session.metadata.namespace!r} was deleted"
    return Plan(
        policy="tenant_deleted",
        conditions=(condition(conditions.FAILED, True, "TenantDeleted", message),),
        status={"end_time_us": observed.now_us},
    )


def tenant_due_us(observed: Observed) -> int | None:
    """When a session whose tenant is gone fails."""
    known = conditions.find(observed.conditions, conditions.BLOCKED)
    if known is None or known.status != "True" or known.reason != "TenantDeleted":
        return None
    return known.last_transition_time_us + seconds_us(limits.FLUSH_ABANDON_S)


def blocked(observed: Observed) -> Condition:
    """What the session waits for somebody to do. Said only of a session that has started."""
    tenant, beat = cluster_of(observed).tenant, observed.beat
    if not tenant.found or tenant.terminating:
        return condition(
            conditions.BLOCKED,
            True,
            "TenantDeleted",
            f"the tenant of namespace {observed.session.metadata.namespace!r} is gone; create it again, or the session "
            f"fails {limits.FLUSH_ABANDON_S:.0f} s after this was seen",
        )
    if tenant.suspended:
        return condition(
            conditions.BLOCKED,
            True,
            "TenantSuspended",
            f"tenant {tenant.name!r} is suspended; the session goes on when its spec.suspended is false",
        )
    if tenant.budget_exhausted:
        said = f": {tenant.budget_message}" if tenant.budget_message else ""
        return condition(
            conditions.BLOCKED,
            True,
            "BudgetExhausted",
            f"the budget is used up{said}. Operations wait and go on when it is raised",
        )
    if beat is not None and beat.view.state == "Blocked":
        return blocked_at_meter(beat.view)
    return condition(conditions.BLOCKED, False, "Unblocked", "nothing blocks the session")


def blocked_at_meter(view: SessionView) -> Condition:
    """Why the meter of a session waits: a budget, else a missing operation."""
    if view.error is not None and view.error.code == BudgetExhaustedError.code:
        return condition(
            conditions.BLOCKED,
            True,
            "BudgetExhausted",
            f"{view.error.message}. Operations wait, nothing is lost, and they go on by themselves",
        )
    return condition(
        conditions.BLOCKED,
        True,
        "SequenceGap",
        f"operation {view.missing_number} is missing; {view.last_received_number} was received. Submit it, or the "
        "session fails when its time is over",
    )
