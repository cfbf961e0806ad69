"""What holds for every plan of a cluster: when nothing is planned, when to look again, what is always said."""

from dataclasses import replace
from typing import Any, Final

from gristmill_contracts import conditions
from gristmill_contracts.conditions import condition
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import WorkersStatus
from gristmill_sessions.attempts import (
    NODE_LOST_US,
    cluster_of,
    created_count,
    endpoint,
    is_started,
    own_pods,
    pending_until_us,
    present_pods,
    ranks,
    ready_count,
    seconds_us,
)
from gristmill_sessions.observed import Observed, Plan
from gristmill_sessions.policies.attempting import meter_due_us, restarts_forgiven_us
from gristmill_sessions.policies.blocking import tenant_due_us
from gristmill_sessions.policies.claiming import PARKING
from gristmill_sessions.queue import is_over

SETTLING: Final = "settling"
SETTLING_S: Final = 1.0

FIRST_VISIT: Final = (
    conditions.ACCEPTED,
    conditions.LEDGER_REGISTERED,
    conditions.QUOTA_RESERVED,
    conditions.PODS_READY,
    conditions.STARTED,
    conditions.READY,
    conditions.SERVING,
)
"""Said from the first visit on: Unknown rather than absent. The others come when they have something to say."""


def settling(observed: Observed) -> Plan | None:
    """Who does not see yet what it did would do it again."""
    if cluster_of(observed).settled:
        return None
    return Plan(policy=SETTLING, again_at_us=observed.now_us + seconds_us(SETTLING_S))


def first_visit(observed: Observed) -> tuple[Condition, ...]:
    if observed.cluster is None:
        return ()
    return tuple(
        condition(type_, None, "NotObserved", "this was not looked at yet")
        for type_ in FIRST_VISIT
        if conditions.find(observed.conditions, type_) is None
    )


def parking(observed: Observed) -> tuple[Condition, ...]:
    """A wish that is not served is answered, never passed over."""
    if observed.cluster is None:
        return ()
    if observed.session.spec.desired_state == "Parked":
        return (condition(conditions.PARKED, False, "ParkingNotServed", PARKING),)
    if conditions.find(observed.conditions, conditions.PARKED) is None:
        return ()
    return (
        condition(conditions.PARKED, False, "NotAsked", "spec.desiredState does not ask for it"),
    )


def of_cluster(observed: Observed, plan: Plan) -> dict[str, Any]:  # Any: fields of the status
    """What the pods tell, whatever the plan was."""
    cluster, status = cluster_of(observed), observed.session.status
    told: dict[str, Any] = {"attempt": observed.attempt}  # Any: fields of the status
    if status.endpoint != endpoint(observed):
        # Only `running` publishes one. It stays while the meter answers, and goes with its pods: clients of a
        # session that ends want the results of what ran.
        told["endpoint"] = ""
    if cluster.cost:
        told["cost"] = cluster.cost
    if observed.attempt == 0:
        return told
    over = is_over(observed.session)
    created = len(present_pods(observed)) if over else created_count(observed)
    told["workers"] = WorkersStatus(
        desired=ranks(observed), created=created, ready=ready_count(observed)
    )
    return told


def wake_in_time(observed: Observed, plan: Plan) -> Plan:
    """Look again when time alone will have changed something."""
    times = [time for time in (plan.again_at_us, *_times(observed)) if time is not None]
    later = [time for time in times if time > observed.now_us]
    return replace(plan, again_at_us=min(later, default=None))


def _times(observed: Observed) -> list[int | None]:
    if observed.session.metadata.deletion_time_us is not None or is_over(observed.session):
        return []
    status, spec = observed.session.status, observed.session.spec
    lifetime_s = spec.limits.lifetime_seconds
    pods = own_pods(observed)
    times: list[int | None] = [meter_due_us(pod) for pod in pods]
    times += [
        None if pod.node_lost_since_us is None else pod.node_lost_since_us + NODE_LOST_US
        for pod in pods
    ]
    times += [None if is_started(observed) else pending_until_us(observed)]
    times += [restarts_forgiven_us(observed), tenant_due_us(observed)]
    if lifetime_s is not None and status.start_time_us is not None:
        times.append(status.start_time_us + seconds_us(lifetime_s))
    return times
