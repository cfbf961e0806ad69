"""Usage as CloudEvents 1.0: the same batches as a meter's, in the JSON that others have tools for.

`source` is the producer, `id` the event's id, `subject` the tenant; `type` says the kind, and `data` is the
rest of the event. What has no attribute of its own is an extension: `epoch` of the producer's log, and
`sequence`, the event's number in it. Everything is read strictly: a misspelt count would else be 0.
"""

import re
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import UsageBatch
from gristmill_contracts.ids import EventId, SessionUid, Stream, TenantName, UsageKind
from gristmill_contracts.usage import Counts, Outcome, UsageEvent
from gristmill_ledger import checks
from gristmill_ledger.problems import TooLargeError

STRUCTURED: Final = "application/cloudevents+json"
BATCHED: Final = "application/cloudevents-batch+json"
KINDS: Final[dict[str, UsageKind]] = {
    "dev.gristmill.usage.v1": "usage",
    "dev.gristmill.attempt.v1": "attempt",
}
_JSON: Final = re.compile(r"application/json(; *charset=utf-8)?", re.IGNORECASE)


class AllCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of all four types: none is taken for 0 because it was left out."""

    prefill: int
    cached_prefill: int
    sample: int
    train: int


class UsageData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`data` of an event. The fields are those of `UsageEvent`."""

    n: int = 0
    session: SessionUid
    stream: Stream
    number: int
    operation: str
    model: str
    project: str = ""
    attempt: int
    outcome: Outcome
    counts: AllCounts | None = None
    """Left out or null: unknown, and kept as that."""
    op_start_us: int
    op_end_us: int
    key: str = ""
    lease: str = ""


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the structured content mode. Extensions that we do not know pass unread."""

    specversion: Literal["1.0"]
    id: str
    source: str
    type: str
    subject: str
    epoch: int | str
    sequence: int | str
    data: UsageData
    datacontenttype: str = "application/json"


def read_events(body: bytes | bytearray, content_type: str) -> list[CloudEvent]:
    """The events of a body in one of the two content modes. Raises InvalidRequestError."""
    mode = content_type.partition(";")[0].strip().lower()
    try:
        if mode == STRUCTURED:
            return [msgspec.json.decode(body, type=CloudEvent)]
        if mode == BATCHED:
            return msgspec.json.decode(body, type=list[CloudEvent])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is no CloudEvents 1.0 of usage in JSON: {error}; see docs/reference/cloudevents.md"
        ) from error
    raise InvalidRequestError(
        f"the content type is {content_type[:100]!r}; send {STRUCTURED} or {BATCHED}"
    )


def to_batch(events: Sequence[CloudEvent]) -> UsageBatch:
    """The batch that a producer's log would have posted. Raises InvalidRequestError or TooLargeError.

    One request is one batch: of one producer and one epoch. The rest is checked as with every batch.
    """
    if not events:
        raise InvalidRequestError("the batch holds no event; send at least one")
    if len(events) > limits.BATCH_EVENTS_MAX:
        raise TooLargeError(
            f"the batch holds {len(events)} events; send at most {limits.BATCH_EVENTS_MAX}"
        )
    usage = [_usage(f"events[{index}]", event) for index, event in enumerate(events)]
    first = events[0]
    epoch = _whole("events[0].epoch", first.epoch)
    for index, event in enumerate(events):
        if (event.source, _whole(f"events[{index}].epoch", event.epoch)) != (first.source, epoch):
            raise InvalidRequestError(
                f"events[{index}] is of source {event.source[:100]!r} and epoch {event.epoch}, "
                f"events[0] of {first.source[:100]!r} and {first.epoch}; send each producer's apart"
            )
    return UsageBatch(
        producer=first.source, epoch=epoch, first_seq=usage[0].producer_seq, events=usage
    )


def _usage(at: str, event: CloudEvent) -> UsageEvent:
    kind = KINDS.get(event.type)
    if kind is None:
        raise InvalidRequestError(
            f"{at}.type is {event.type[:100]!r}; it must be {' or '.join(KINDS)}"
        )
    if not _JSON.fullmatch(event.datacontenttype):
        raise InvalidRequestError(
            f"{at}.datacontenttype is {event.datacontenttype[:100]!r}; usage is application/json"
        )
    data = event.data
    return UsageEvent(
        event_id=EventId(event.id),
        producer_seq=_whole(f"{at}.sequence", event.sequence),
        kind=kind,
        n=data.n,
        tenant=TenantName(event.subject),
        session=data.session,
        stream=data.stream,
        number=data.number,
        operation=data.operation,
        model=data.model,
        project=data.project,
        attempt=data.attempt,
        outcome=data.outcome,
        counts=None if data.counts is None else Counts(**msgspec.structs.asdict(data.counts)),
        op_start_us=data.op_start_us,
        op_end_us=data.op_end_us,
        key=data.key,
        lease=data.lease,
    )


def _whole(field: str, value: int | str) -> int:
    """An extension that counts. CloudEvents' own integers have 32 bits, so larger ones are text, and text
    that sorts as its number does has zeros before it.
    """
    if isinstance(value, int):
        return value
    return checks.whole_number(field, value.lstrip("0") or value[:1])
