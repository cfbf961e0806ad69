"""What becomes of a batch of usage: pure, so that every order of arrival can be tried.

Nothing is refused late: what is odd about an event is written down with it, and a payload that disagrees
with an id that is taken becomes a dead letter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.errors import ConflictError, InvalidRequestError, NotFoundError
from gristmill_contracts.http import UsageBatch
from gristmill_contracts.ids import EventId, OpId, event_id
from gristmill_contracts.usage import OPERATION_KINDS, TOKEN_TYPES, UsageEvent
from gristmill_ledger import checks
from gristmill_ledger.prices import PriceList

METER_KINDS: Final = ("usage", "attempt")
"""What a meter may post; the other kinds are the ledger's own."""

_UNKNOWN: Final = (None,) * len(TOKEN_TYPES)


class SequenceGapError(ConflictError):
    """A batch begins beyond the next number of its producer. Nothing was stored."""

    def __init__(self, message: str, expected_seq: int) -> None:
        super().__init__(message)
        self.expected_seq = expected_seq


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerState:
    """A registered producer, as its row says."""

    producer: str
    tenant: str
    session: str
    epoch: int
    attempt: int
    acked_seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An event with its frozen bytes: they are made once, for dedupe and for the chain."""

    event: UsageEvent
    values: tuple[encoding.Value, ...]
    """In the order of `encoding.FACTS`."""
    facts: bytes
    digest: bytes
    """The `payload_hash`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a batch: each event is in exactly one of the three."""

    new: list[Encoded]
    duplicates: list[Encoded]
    conflicts: list[Encoded]
    acked_seq: int
    fenced: bool
    """From a log that no longer owns the session: kept, for it may have been released before its meter
    knew; the cursor is of the owner's log, and stays."""


def encode_event(event: UsageEvent) -> Encoded:
    """The event's facts. Where it was posted from (producer_seq, attempt, lease) is left out: the same
    operation posted again by another attempt or from a rebuilt log is the same fact.
    """
    counts = event.counts
    tokens: tuple[int | None, ...] = _UNKNOWN
    if counts is not None:
        tokens = (counts.prefill, counts.cached_prefill, counts.sample, counts.train)
    values = (
        encoding.VERSION, event.event_id, event.kind, event.n, event.tenant, event.session,
        event.stream, event.number, event.operation, event.model, event.project, event.key,
        event.outcome, *tokens, event.op_start_us, event.op_end_us, event.corrects, event.reason,
    )  # fmt: skip
    facts = encoding.encode(values)
    return Encoded(event=event, values=values, facts=facts, digest=encoding.payload_hash(facts))


def payload_hash(event: UsageEvent) -> bytes:
    """SHA-256 of the event's facts."""
    return encode_event(event).digest


def check_batch(batch: UsageBatch) -> None:
    """Raise InvalidRequestError naming the first field that no honest meter sends."""
    checks.text("producer", batch.producer)
    checks.quantity("epoch", batch.epoch)
    if batch.first_seq < 1:
        raise InvalidRequestError(f"first_seq is {batch.first_seq}; a log numbers from 1")
    if not batch.events:
        raise InvalidRequestError("the batch holds no event; send at least one")
    for index, event in enumerate(batch.events):
        if not _is_plain(event):
            _check_event(f"events[{index}]", event)
        if event.producer_seq != batch.first_seq + index:
            raise InvalidRequestError(
                f"events[{index}].producer_seq is {event.producer_seq}, not "
                f"{batch.first_seq + index}; a batch is contiguous from first_seq"
            )


def _is_plain(event: UsageEvent) -> bool:
    """Whether every field is in bounds, at once: nearly all events are, and need no closer look."""
    counts = event.counts
    tokens = () if counts is None else (
        counts.prefill, counts.cached_prefill, counts.sample, counts.train,
    )  # fmt: skip
    quantities = (event.producer_seq, event.n, event.number, event.attempt, *tokens)
    times = (event.op_start_us, event.op_end_us)
    names = (event.event_id, event.tenant, event.session, event.operation, event.model)
    text = "".join((*names, event.project, event.key, event.lease))
    return (
        min(quantities) >= 0
        and max(quantities) <= limits.QUANTITY_MAX
        and min(times) >= -limits.QUANTITY_MAX
        and max(times) <= limits.QUANTITY_MAX
        and all(names)
        and len(text) <= limits.LEDGER_TEXT_CHARS_MAX
        and "\0" not in text
        and event.kind in METER_KINDS
        and not (event.corrects or event.reason)
    )


def _check_event(at: str, event: UsageEvent) -> None:
    for field in ("event_id", "tenant", "session", "operation", "model"):
        checks.text(f"{at}.{field}", getattr(event, field))
    for field in ("project", "key", "lease"):
        checks.text(f"{at}.{field}", getattr(event, field), empty=True)
    if event.kind not in METER_KINDS or event.corrects or event.reason:
        raise InvalidRequestError(
            f"{at} is a correction ({event.kind}, corrects {event.corrects[:40]!r}); a meter posts "
            f"{' and '.join(METER_KINDS)}, and corrections are the ledger's own"
        )
    for field in ("producer_seq", "n", "number", "attempt"):
        checks.quantity(f"{at}.{field}", getattr(event, field))
    for field in ("op_start_us", "op_end_us"):
        checks.signed(f"{at}.{field}", getattr(event, field))
    if event.counts is not None:
        for field in TOKEN_TYPES:
            checks.quantity(f"{at}.counts.{field}", getattr(event.counts, field))


def decide(
    batch: UsageBatch,
    state: ProducerState,
    known: Mapping[str, bytes],
    attempt: int | None = None,
) -> Decision:
    """Sort the events of a batch. `known`: event id -> payload hash of rows already stored.

    attempt: of the meter that posts; None = not told. Raises NotFoundError (epoch not registered),
    SequenceGapError, or InvalidRequestError for an event of another tenant.
    """
    fenced = batch.epoch < state.epoch or (attempt is not None and attempt < state.attempt)
    if not fenced:
        _check_place(batch, state)
    seen: dict[str, bytes] = {}
    new, duplicates, conflicts = [], [], []
    for event in batch.events:
        if event.tenant != state.tenant:
            raise InvalidRequestError(
                f"event {event.event_id} is of tenant {event.tenant!r}, but producer "
                f"{state.producer} is registered for {state.tenant!r}; register one for each tenant"
            )
        encoded = encode_event(event)
        digest = known.get(event.event_id) or seen.get(event.event_id)
        if digest is None:
            seen[event.event_id] = encoded.digest
            new.append(encoded)
        elif digest == encoded.digest:
            duplicates.append(encoded)
        else:
            conflicts.append(encoded)
    last_seq = batch.first_seq + len(batch.events) - 1
    return Decision(
        new=new,
        duplicates=duplicates,
        conflicts=conflicts,
        acked_seq=last_seq if fenced else max(state.acked_seq, last_seq),
        fenced=fenced,
    )


def _check_place(batch: UsageBatch, state: ProducerState) -> None:
    if batch.epoch > state.epoch:
        raise NotFoundError(
            f"producer {state.producer} is registered with epoch {state.epoch}, not "
            f"{batch.epoch}; register the new log first"
        )
    if batch.first_seq > state.acked_seq + 1:
        raise SequenceGapError(
            f"producer {state.producer} sent from {batch.first_seq}, but {state.acked_seq + 1} "
            "comes next; send from there",
            state.acked_seq + 1,
        )


def oddities(
    event: UsageEvent,
    state: ProducerState,
    *,
    prices: PriceList,
    registered: bool,
    now_us: int,
    fenced: bool = False,
) -> str | None:
    """Why an event is quarantined, or None. It is stored, shown and counted all the same."""
    reasons = ["fenced_attempt"] if fenced else []
    if event.operation not in OPERATION_KINDS:
        reasons.append("unknown_operation")
    if not registered:
        reasons.append("unknown_session")
    if event.event_id != _own_id(event):
        reasons.append("event_id")
    if event.session != state.session:
        reasons.append("session_of_another_producer")
    early_us = now_us - limits.EVENT_AGE_S_MAX * 1_000_000
    late_us = now_us + limits.EVENT_AHEAD_S_MAX * 1_000_000
    if not early_us <= event.op_start_us <= late_us or event.op_end_us < event.op_start_us:
        reasons.append("clock")
    if event.counts is None:
        reasons.append("unknown_usage")
    elif any(
        getattr(event.counts, name) and not prices.has(event.model, name, event.op_start_us)
        for name in TOKEN_TYPES
    ):
        reasons.append("unpriced")
    return ",".join(reasons) or None


def _own_id(event: UsageEvent) -> EventId:
    """The id that the operation's name makes: whoever takes over a retry computes the same."""
    return event_id(OpId(event.session, event.stream, event.number), event.kind, event.n)
