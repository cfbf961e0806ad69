"""What differs between worker, meter and ledger. Pure: facts in, differences out.

Every pair is compared at a point that both have reached, so that what is under way is no difference.
Nothing is rounded, and nothing is forgiven.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from gristmill_contracts import limits
from gristmill_contracts.reconciliation import (
    NOTHING,
    ReconPoint,
    Tally,
    WorkerPoint,
    differences,
    worker_differences,
)

Pair = Literal["worker-meter", "meter-ledger", "ledger"]
"""Whose figures differ. `ledger`: its own tables among each other."""
Kind = Literal["missing", "duplicate", "mismatch", "orphan_reservation", "unknown"]
"""missing, duplicate: the second of the pair has fewer, or more, operations. mismatch: as many, with other
tokens. orphan_reservation: a hold that nobody answers for. unknown: usage that nobody can tell."""

WAIT_US: Final = int(limits.RECON_WAIT_S * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What was found minus what was expected."""

    pair: Pair
    kind: Kind
    tenant: str
    session: str
    subject: str
    """What it is of: a kind of operation, an event, a hold, a gap."""
    delta: Tally = NOTHING
    amount: int = 0
    """What a hold still holds, in its budget's unit."""
    detail: str
    """A sentence for people."""

    @property
    def id(self) -> str:
        """The same for the same difference in every run. An amount may shrink meanwhile."""
        identity = (
            self.pair, self.kind, self.tenant, self.session, self.subject,
            self.delta.operations, *self.delta.tokens,
        )  # fmt: skip
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the ledger holds of a session's log up to the point that its meter told."""

    acked_seq: int
    told: Mapping[str, Tally]
    """By `tally_name`, within the point's numbers."""
    told_unfenced: Mapping[str, Tally]
    """The same without rows that a fenced attempt handed in: they may lie beside the log, or be of it."""
    unknown_events: tuple[str, ...] = ()
    """Ids of events whose usage is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """All that is compared of one session."""

    tenant: str
    uid: str
    point: ReconPoint
    told_us: int
    """When its meter told the point."""
    stored: Stored | None
    """None = its log has never registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    in_flight: bool
    """The ledger has not come to what the meter told: it is compared later."""
    differences: tuple[Difference, ...]


def judge(session: Session, now_us: int) -> Verdict:
    """Compare worker with log, and log with ledger."""
    found = [
        *(each for point in session.point.workers for each in _worker(session, point)),
        *_waiting(session, now_us),
        *_unknown(session),
    ]
    log, stored = session.point.log, session.stored
    acked = stored.acked_seq if stored is not None else 0
    if acked < log.seq:
        if now_us - session.told_us <= WAIT_US:
            return Verdict(in_flight=True, differences=tuple(found))
        found.append(_unshipped(session, acked))
    elif stored is not None:
        found += _ledger(session, stored)
    return Verdict(in_flight=False, differences=tuple(found))


def _kind(delta: Tally) -> Kind:
    if delta.operations < 0:
        return "missing"
    return "duplicate" if delta.operations > 0 else "mismatch"


def _worker(session: Session, point: WorkerPoint) -> Iterator[Difference]:
    for kind, delta in worker_differences(point).items():
        yield Difference(
            pair="worker-meter",
            kind=_kind(delta),
            tenant=session.tenant,
            session=session.uid,
            subject=f"{kind} of boot {point.boot_id} opening {point.opening}",
            delta=delta,
            detail=f"the worker ran {_words(point.ran.get(kind, NOTHING))} and the log took "
            f"{_words(point.logged.get(kind, NOTHING))}",
        )


def _waiting(session: Session, now_us: int) -> Iterator[Difference]:
    since_us = session.point.waiting_since_us
    if since_us is not None and session.told_us - since_us > WAIT_US:
        yield Difference(
            pair="worker-meter",
            kind="unknown",
            tenant=session.tenant,
            session=session.uid,
            subject=f"since {since_us}",
            detail="the worker and the log have not agreed since then, and were never at rest",
        )


def _ledger(session: Session, stored: Stored) -> Iterator[Difference]:
    log = session.point.log
    found = differences(log.told, stored.told)
    if found and not differences(log.told, stored.told_unfenced):
        return
    for name, delta in found.items():
        yield Difference(
            pair="meter-ledger",
            kind=_kind(delta),
            tenant=session.tenant,
            session=session.uid,
            subject=name,
            delta=delta,
            detail=f"the log holds {_words(log.told.get(name, NOTHING))} up to {log.seq} and the ledger "
            f"{_words(stored.told.get(name, NOTHING))}",
        )


def _unshipped(session: Session, acked: int) -> Difference:
    log = session.point.log
    return Difference(
        pair="meter-ledger",
        kind="missing",
        tenant=session.tenant,
        session=session.uid,
        subject="unshipped",
        delta=Tally(acked - log.seq),
        detail=f"the log holds usage up to {log.seq}, the ledger up to {acked}, and the meter is silent",
    )


def _unknown(session: Session) -> Iterator[Difference]:
    for event_id in session.stored.unknown_events if session.stored else ():
        yield Difference(
            pair="meter-ledger",
            kind="unknown",
            tenant=session.tenant,
            session=session.uid,
            subject=f"event {event_id}",
            delta=Tally(1),
            detail="the event says that its usage is unknown",
        )


def _words(tally: Tally) -> str:
    prefill, cached, sample, train = tally.tokens
    return (
        f"{tally.operations} operations (prefill {prefill}, cached {cached}, sample {sample}, "
        f"train {train})"
    )
