"""What should happen to a session next: the first policy of a chain that has an answer. Pure.

Order is precedence. A plan is a step, not a script: after it was carried out the session is observed
again, and a session that needs nothing gets a plan without actions. Queueing, quota, budgets and
parking each become one more policy in this chain.
"""

from collections.abc import Callable
from typing import Any, Final

from gristmill_contracts import conditions
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.session import TrainingSessionStatus, UsageStatus
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.policies.deletion import deletion
from gristmill_sessions.policies.ending import (
    ended,
    expiry,
    meter_failure,
    pending_timeout,
    restarts_exceeded,
    stop,
)
from gristmill_sessions.policies.serving import serving
from gristmill_sessions.policies.starting import acceptance, adopt, placement, registration
from gristmill_sessions.state import derive_state

Policy = Callable[[Observed], Plan | None]

CHAIN: Final[tuple[Policy, ...]] = (
    deletion,
    ended,
    adopt,
    meter_failure,
    expiry,
    stop,
    restarts_exceeded,
    pending_timeout,
    acceptance,
    registration,
    placement,
)
ACTIVITY_ROUNDED_US: Final = 60_000_000


def make_plan(observed: Observed) -> Plan:
    """The first answer of CHAIN, else that of `serving`."""
    for policy in CHAIN:
        plan = policy(observed)
        if plan is not None:
            return plan
    return serving(observed)


def next_status(observed: Observed, plan: Plan) -> TrainingSessionStatus:
    """The status after the plan. Equal to the present one where there is nothing new to say."""
    session = observed.session
    merged = conditions.merge(
        session.status.conditions,
        plan.conditions,
        now_us=observed.now_us,
        generation=session.metadata.generation,
    )
    changes: dict[str, Any] = {  # Any: fields of the status
        **_from_heartbeat(session.status, observed.heartbeat),
        "restarts": observed.failures.count,
        **plan.status,
        "conditions": merged,
        "observed_generation": session.metadata.generation,
        "state": derive_state(session.spec, session.metadata.deletion_time_us, merged),
    }
    return session.status.model_copy(update=changes)


def _from_heartbeat(
    status: TrainingSessionStatus, heartbeat: Heartbeat | None
) -> dict[str, Any]:  # Any: fields of the status
    """Informative: the ledger is the truth of usage, the meter that of sequence numbers."""
    if heartbeat is None:
        return {}
    view = heartbeat.view
    rounded = view.last_activity_us - view.last_activity_us % ACTIVITY_ROUNDED_US
    return {
        "last_received_sequence": max(status.last_received_sequence, view.last_received_number),
        "last_activity_time_us": rounded or None,
        "usage": UsageStatus(
            prefill=view.counts.prefill,
            cached_prefill=view.counts.cached_prefill,
            sample=view.counts.sample,
            train=view.counts.train,
        ),
    }


INFORMATIVE: Final = frozenset({"last_received_sequence", "last_activity_time_us", "usage"})
INFORMATIVE_EVERY_S: Final = 10


def write_is_due(
    before: TrainingSessionStatus, after: TrainingSessionStatus, since_last_s: float
) -> bool:
    """Whether a new status is worth a write now. What only informs is written now and then."""
    if before == after:
        return False
    if since_last_s >= INFORMATIVE_EVERY_S:
        return True
    return before.model_dump(exclude=set(INFORMATIVE)) != after.model_dump(exclude=set(INFORMATIVE))
