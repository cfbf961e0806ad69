"""Frames that the meter writes of its own accord, not for what a worker answered. Pure."""

from gristmill_contracts.errors import GristmillError
from gristmill_contracts.http import Assignment, Problem
from gristmill_contracts.operations import stream_counts
from gristmill_meter.frames import Failed, Opened
from gristmill_meter.records import Record


def opened(assignment: Assignment, now_us: int) -> Opened:
    return Opened(
        uid=assignment.uid,
        tenant=assignment.tenant,
        project=assignment.project,
        model=assignment.model,
        attempt=assignment.attempt,
        at_us=now_us,
    )


def cut(record: Record, why: str, now_us: int) -> Failed:
    """A stream that did not reach its end: billed at what was durable, if anything left."""
    counts = None
    if record.progress_tokens > 0:
        counts = stream_counts(
            record.progress_prompt, record.progress_cached, record.progress_tokens
        )
    message = f"the stream was cut after {record.progress_tokens} tokens: {why}"
    return Failed(
        stream="log",
        number=record.number,
        error=Problem(code="unavailable", message=message, retryable=True),
        index=0,
        wall_us=0,
        started_us=record.started_us or now_us,
        at_us=now_us,
        counts=counts,
        lease=record.lease,
    )


def never_dispatched(record: Record, error: GristmillError, now_us: int) -> Failed:
    return Failed(
        stream=record.stream,
        number=record.number,
        error=Problem(code=error.code, message=error.message),
        index=0,
        wall_us=0,
        started_us=now_us,
        at_us=now_us,
    )
