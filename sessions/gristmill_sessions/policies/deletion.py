"""A deleted session goes once the ledger has its usage, or at the end of a bounded wait."""

from typing import Final

from gristmill_contracts import conditions, labels
from gristmill_contracts.resources import Condition
from gristmill_sessions.observed import (
    Drain,
    Observed,
    Plan,
    Release,
    RemoveFiles,
    Withdraw,
)

FLUSH_S_MAX: Final = 900
"""How long a deletion waits for the meter to post what it holds."""


def deletion(observed: Observed) -> Plan | None:
    meta = observed.session.metadata
    if meta.deletion_time_us is None:
        return None
    if labels.METERING_FLUSH not in meta.finalizers:
        left = ", ".join(meta.finalizers)
        return Plan(
            policy="deletion", conditions=(_deleting(f"waits for finalizers of others: {left}"),)
        )
    overdue_us = meta.deletion_time_us + FLUSH_S_MAX * 1_000_000
    overdue = observed.now_us >= overdue_us
    if observed.flushed or overdue:
        return _remove(observed, overdue=overdue)
    drain = () if observed.seat is None or observed.seat.stopping else (Drain(),)
    return Plan(
        policy="deletion",
        actions=drain,
        conditions=(_deleting(_waits_for(observed)),),
        again_at_us=overdue_us,
    )


def _remove(observed: Observed, *, overdue: bool) -> Plan:
    """Everything goes. What went wrong at the last try becomes visible once the time is over."""
    withdraw = () if observed.seat is None else (Withdraw(),)
    failed = bool(observed.error) and overdue
    note = conditions.condition(
        conditions.DELETED,
        False,
        "FlushFailed" if failed else "InProgress",
        observed.error if failed else "files are being removed",
    )
    return Plan(
        policy="deletion",
        actions=(*withdraw, RemoveFiles(flushed=observed.flushed), Release()),
        conditions=(note,),
    )


def _waits_for(observed: Observed) -> str:
    beat = observed.beat
    if beat is None:
        return "waits for the meter to tell what usage it still holds"
    if beat.view.state != "Closed":
        return "waits for the meter to end the session"
    return (
        f"waits for the ledger to acknowledge usage up to {beat.head_seq}; it has {beat.acked_seq}"
    )


def _deleting(message: str) -> Condition:
    return conditions.condition(conditions.DELETED, False, "InProgress", message)
