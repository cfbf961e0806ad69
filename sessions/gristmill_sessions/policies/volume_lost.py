"""The claim of a session's volume is gone though nobody of ours deleted it. What follows depends on the log.

A claim is protected for as long as a pod that has a node uses it, so that it goes under sessions that wait:
for a node, for their next attempt. Before the session served there is no log, and the volume is made
again (`placing`). Afterwards the log went with it: what clients were answered cannot be repeated, so the
session has failed, and what the ledger had not heard yet is on record as a gap.
"""

from gristmill_contracts import conditions
from gristmill_contracts.conditions import condition
from gristmill_contracts.session import LastFailure
from gristmill_sessions.attempts import cluster_of, is_started, is_volume_gone, seconds_us
from gristmill_sessions.observed import VOLUME_LOST, Observed, Plan
from gristmill_sessions.policies.closing import HEARTBEAT_SILENT_S, record_gap
from gristmill_sessions.wording import clip

ASK_AGAIN_US = 10_000_000


def log_lost(observed: Observed) -> Plan | None:
    """The gap first, then the end: an end without a record could not be told from one without a loss."""
    if not is_volume_gone(observed) or not is_started(observed):
        return None
    if observed.flushed:
        return _failed(observed)
    said = f"{_what(observed)}; the gap is being recorded at the ledger"
    if observed.error:
        said += f". This failed and is tried again: {observed.error}"
    beat = observed.heartbeat
    silent_us = 0 if beat is None else beat.at_us + seconds_us(HEARTBEAT_SILENT_S)
    is_heard = cluster_of(observed).ledger_read and observed.now_us >= silent_us
    return Plan(
        policy="log_lost",
        actions=(record_gap(observed, VOLUME_LOST),) if is_heard else (),
        conditions=(
            condition(conditions.PODS_READY, False, VOLUME_LOST, clip(said)),
            condition(conditions.READY, False, VOLUME_LOST, clip(said)),
            condition(conditions.SERVING, False, VOLUME_LOST, clip(said)),
        ),
        again_at_us=None if is_heard else max(silent_us, observed.now_us + ASK_AGAIN_US),
        more=is_heard,
    )


def _failed(observed: Observed) -> Plan:
    message = clip(
        f"{_what(observed)}; what the ledger had not heard of it is on record there as a gap. Start a new "
        "session, from the last checkpoint if there is one"
    )
    failure = LastFailure(reason="LogLost", message=message, time_us=observed.now_us)
    return Plan(
        policy="log_lost",
        conditions=(condition(conditions.FAILED, True, "LogLost", message),),
        status={"end_time_us": observed.now_us, "last_failure": failure},
    )


def _what(observed: Observed) -> str:
    meta = observed.session.metadata
    return (
        f"somebody deleted the volume claim {meta.namespace}/{meta.name}-state, and with it the log of the "
        f"session, while no pod of attempt {observed.attempt} used it"
    )
