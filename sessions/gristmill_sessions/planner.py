"""What should happen to a session next: the first policy of a chain that has an answer. Pure.

Order is precedence. A plan is a step, not a script: after it was carried out the session is observed
again, and a session that needs nothing gets a plan without actions. One machine and a cluster have a chain
each: they share what does not depend on how pods, meters and volumes come and go.
"""

from collections.abc import Callable
from typing import Any, Final

from gristmill_contracts import conditions
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.session import TrainingSessionStatus, UsageStatus
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.policies.attempting import attempt_over, fatal
from gristmill_sessions.policies.blocking import tenant_deleted
from gristmill_sessions.policies.claiming import acceptance as acceptance_in_cluster
from gristmill_sessions.policies.claiming import adoption, claim
from gristmill_sessions.policies.claiming import registration as registration_in_cluster
from gristmill_sessions.policies.cluster_ending import halt, over, removal
from gristmill_sessions.policies.deletion import deletion
from gristmill_sessions.policies.ending import (
    ended,
    expiry,
    meter_failure,
    pending_timeout,
    restarts_exceeded,
    stop,
)
from gristmill_sessions.policies.placing import placement as placement_in_cluster
from gristmill_sessions.policies.placing import strays
from gristmill_sessions.policies.running import running
from gristmill_sessions.policies.serving import serving
from gristmill_sessions.policies.settling import (
    SETTLING,
    first_visit,
    of_cluster,
    parking,
    settling,
    wake_in_time,
)
from gristmill_sessions.policies.starting import acceptance, adopt, placement, registration
from gristmill_sessions.policies.volume_lost import log_lost
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
CLUSTER_CHAIN: Final[tuple[Policy, ...]] = (
    settling,
    removal,
    over,
    adoption,
    meter_failure,
    expiry,
    halt,
    tenant_deleted,
    strays,
    log_lost,
    fatal,
    attempt_over,
    pending_timeout,
    acceptance_in_cluster,
    registration_in_cluster,
    claim,
    placement_in_cluster,
)
ACTIVITY_ROUNDED_US: Final = 60_000_000


def make_plan(observed: Observed) -> Plan:
    """The first answer of the chain, else that of its last policy, which always has one."""
    if observed.cluster is not None:
        return wake_in_time(observed, _first(CLUSTER_CHAIN, running, observed))
    return _first(CHAIN, serving, observed)


def _first(chain: tuple[Policy, ...], last: Callable[[Observed], Plan], observed: Observed) -> Plan:
    for policy in chain:
        plan = policy(observed)
        if plan is not None:
            return plan
    return last(observed)


def next_status(observed: Observed, plan: Plan) -> TrainingSessionStatus:
    """The status after the plan. Equal to the present one where there is nothing new to say."""
    session = observed.session
    if plan.policy == SETTLING:
        return session.status
    told = (*first_visit(observed), *plan.conditions, *parking(observed))
    merged = conditions.merge(
        session.status.conditions,
        told,
        now_us=observed.now_us,
        generation=session.metadata.generation,
    )
    changes: dict[str, Any] = {  # Any: fields of the status
        **_from_heartbeat(session.status, observed.heartbeat),
        **(_of_machine(observed) if observed.cluster is None else of_cluster(observed, plan)),
        **plan.status,
        "conditions": merged,
        "observed_generation": session.metadata.generation,
        "state": derive_state(session.spec, session.metadata.deletion_time_us, merged),
    }
    return session.status.model_copy(update=changes)


def _of_machine(observed: Observed) -> dict[str, Any]:  # Any: fields of the status
    return {"restarts": observed.failures.count}


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


INFORMATIVE: Final = frozenset({"last_received_sequence", "last_activity_time_us", "usage", "cost"})
INFORMATIVE_EVERY_S: Final = 10


def write_is_due(
    before: TrainingSessionStatus,
    after: TrainingSessionStatus,
    since_last_s: float,
    every_s: float = INFORMATIVE_EVERY_S,
) -> bool:
    """Whether a new status is worth a write now. What only informs is written every `every_s` at most:
    in a cluster limits.STATUS_USAGE_EVERY_S."""
    if before == after:
        return False
    if since_last_s >= every_s:
        return True
    return before.model_dump(exclude=set(INFORMATIVE)) != after.model_dump(exclude=set(INFORMATIVE))
