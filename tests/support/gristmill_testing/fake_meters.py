"""Meters of pods that nobody runs: they tell the ledger what a meter would, with its own secret.

For fake nodes, which call every pod Running. A pod of rank 0 that is Running gets a meter that serves,
obeys directives, and counts the tokens that a test gives it; that of a drain Job closes the log at once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from gristmill_contracts import labels, secrets, units
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.http import (
    ATTEMPT_HEADER,
    CONTENT_TYPE,
    SESSION_HEADER,
    Heartbeat,
    SessionView,
)
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.usage import Counts

Json = dict[str, Any]
BEAT_S = 1.0


@dataclass(slots=True)
class Seat:
    """One meter."""

    uid: str
    attempt: int
    tenant: str
    pod: str
    state: Literal["Serving", "Recovering", "Blocked", "Failed", "Draining", "Closed"] = "Serving"
    counts: Counts = field(default_factory=Counts)
    last_number: int = 0
    head_seq: int = 0
    acked_seq: int = 0

    def beat(self) -> Heartbeat:
        now = units.now_us()
        view = SessionView(
            uid=SessionUid(self.uid),
            attempt=self.attempt,
            last_received_number=self.last_number,
            next_number=self.last_number + 1,
            missing_number=None,
            missing_since_us=None,
            state=self.state,
            error=None,
            counts=self.counts,
            last_activity_us=0 if self.last_number == 0 else now,
            open_operations=0,
        )
        return Heartbeat(
            view=view, tenant=TenantName(self.tenant), acked_seq=self.acked_seq, head_seq=self.head_seq,
            snapshot_applied=self.last_number, worker_ready=True, at_us=now,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class FakeMeters:
    """`deaf` sessions (by name) obey no directive; `mute` ones send no heartbeat."""

    ledger_url: str
    key: bytes
    pods: Callable[[], list[Json]]
    sessions: Callable[[], list[Json]]
    seats: dict[str, Seat] = field(default_factory=dict)
    """By pod uid."""
    deaf: set[str] = field(default_factory=set)
    mute: set[str] = field(default_factory=set)
    ended: threading.Event = field(default_factory=threading.Event)
    beats: int = 0

    def run(self) -> None:
        while not self.ended.wait(BEAT_S):
            try:
                self.round()
            except (OSError, HTTPException, AssertionError):
                time.sleep(BEAT_S)  # API server or ledger is away: a meter tries again

    def round(self) -> None:
        uids = {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each["metadata"]
            .get("annotations", {})
            .get(labels.SESSION_ID, each["metadata"]["uid"])
            for each in self.sessions()
        }
        running = {}
        for pod in self.pods():
            meta, status = pod["metadata"], pod.get("status", {})
            marks = meta.get("labels", {})
            serves = status.get("phase") == "Running" and not meta.get("deletionTimestamp")
            uid = uids.get((meta["namespace"], marks.get(labels.SESSION, "")))
            if not serves or uid is None or marks.get(labels.RANK) != "0":
                continue
            seat = self.seats.get(meta["uid"]) or Seat(
                uid, int(marks[labels.ATTEMPT]), marks.get(labels.TENANT, ""), marks[labels.SESSION]
            )
            if marks.get("app.kubernetes.io/component") == "drain":
                seat.state = "Closed"
            running[meta["uid"]] = seat
        self.seats = running
        for seat in running.values():
            if seat.pod not in self.mute:
                self._tell(seat)

    def _tell(self, seat: Seat) -> None:
        address = urlsplit(self.ledger_url)
        connection = HTTPConnection(address.hostname or "", address.port, timeout=5)
        try:
            connection.request(
                "POST", "/v1/heartbeats", msgspec.msgpack.encode([seat.beat()]),
                {
                    "Content-Type": CONTENT_TYPE,
                    "Authorization": "Bearer "
                    + secrets.producer_secret(self.key, SessionUid(seat.uid), seat.attempt),
                    SESSION_HEADER: seat.uid, ATTEMPT_HEADER: str(seat.attempt),
                },
            )  # fmt: skip
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            return
        self.beats += 1
        told = msgspec.msgpack.decode(body, type=HeartbeatAnswer)
        if told.directives.get(seat.uid) == "stop" and seat.pod not in self.deaf:
            seat.state = "Closed"

    def seat_of(self, name: str) -> Seat | None:
        """The meter of a session, by the session's name."""
        return next((seat for seat in self.seats.values() if seat.pod == name), None)


@contextmanager
def fake_meters(**parts: Any) -> Iterator[FakeMeters]:  # Any: fields of FakeMeters
    meters = FakeMeters(**parts)
    thread = threading.Thread(target=meters.run, name="fake-meters", daemon=True)
    thread.start()
    try:
        yield meters
    finally:
        meters.ended.set()
        thread.join(30)
