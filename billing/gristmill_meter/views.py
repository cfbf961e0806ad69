"""What the outside sees of a session's state. Pure."""

from typing import Literal

import msgspec

from gristmill_contracts.http import OperationState, Problem, SessionView
from gristmill_contracts.ids import Stream
from gristmill_contracts.usage import Counts
from gristmill_meter.records import Record, SessionState

ServiceState = Literal["Serving", "Recovering", "Blocked", "Failed", "Draining", "Closed"]


class EncodedOperationView(msgspec.Struct, kw_only=True):
    """`http.OperationView` with the result still encoded, as it lies in the log."""

    stream: Stream
    number: int
    kind: str
    state: OperationState
    result: msgspec.Raw | None = None
    counts: Counts | None = None
    error: Problem | None = None


def operation_view(
    record: Record, state: OperationState, result: bytes | None = None
) -> EncodedOperationView:
    """`state` may lag behind the record's own: an end is told only once it is durable."""
    counted = state == "Completed" or (state == "Failed" and record.counts.total > 0)
    return EncodedOperationView(
        stream=record.stream,
        number=record.number,
        kind=record.kind,
        state=state,
        result=None if result is None else msgspec.Raw(result),
        counts=record.counts if counted else None,
        error=record.error if state in ("Failed", "Skipped", "Refused") else None,
    )


def session_view(state: SessionState, service: ServiceState, attempt: int) -> SessionView:
    return SessionView(
        uid=state.uid,
        attempt=attempt,
        last_received_number=state.last_received_number,
        next_number=state.next_number,
        missing_number=state.missing_number,
        missing_since_us=state.missing_since_us,
        state=service,
        error=state.failure,
        counts=state.counts,
        last_activity_us=state.last_activity_us,
        open_operations=len(state.open_keys),
    )
