"""What the supervisor knows of the moment, and how a session is observed in it. No input or output."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gristmill_cli.local.layout import GroupKey
from gristmill_contracts import conditions
from gristmill_contracts.http import Heartbeat
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import TrainingSession
from gristmill_sessions.failure import backoff_s
from gristmill_sessions.identity import session_uid
from gristmill_sessions.observed import Observed, Seat, WorkerFailures

Progress = tuple[int, int, int]
NO_PROGRESS: Final[Progress] = (0, 0, 0)


@dataclass(slots=True)
class World:
    """Filled by the supervisor's tasks on one event loop; read when a session is planned."""

    heartbeats: dict[SessionUid, Heartbeat] = field(default_factory=dict)
    registered: set[SessionUid] = field(default_factory=set)
    seats: dict[SessionUid, Seat] = field(default_factory=dict)
    failures: dict[SessionUid, WorkerFailures] = field(default_factory=dict)
    errors: dict[SessionUid, str] = field(default_factory=dict)
    progress: dict[SessionUid, Progress] = field(default_factory=dict)
    meters_away: set[GroupKey] = field(default_factory=set)

    def take_heartbeats(self, heartbeats: Iterable[Heartbeat]) -> None:
        """Remember the newest; a session that got further has recovered from what failed before."""
        for heartbeat in heartbeats:
            uid = heartbeat.view.uid
            self.heartbeats[uid] = heartbeat
            made = progress_of(heartbeat)
            if made > self.progress.get(uid, NO_PROGRESS):
                self.progress[uid] = made
                self.failures.pop(uid, None)

    def worker_ended(self, sessions: Iterable[TrainingSession], code: int, log: str) -> None:
        """Count the end of a worker against the sessions that it may have been running."""
        for session in sessions:
            uid = session_uid(session)
            known = self.failures.get(uid, WorkerFailures())
            self.failures[uid] = replace(
                known,
                count=known.count + 1,
                exit_code=code,
                message=f"the worker ended with exit code {code}; its log is {log}",
            )

    def pause_s(self, sessions: Iterable[TrainingSession], jitter: float) -> float:
        """How long a worker is to wait before its restart: the first one is at once, then as the
        most patient failure policy of its sessions says, until one of them gets further."""
        pauses = [
            backoff_s(session.spec.failure_policy, failures.count - 1, jitter)
            for session in sessions
            if (failures := self.failures.get(session_uid(session))) and failures.count > 1
        ]
        return max(pauses, default=0.0)

    def forget(self, uid: SessionUid) -> None:
        for table in (self.heartbeats, self.seats, self.failures, self.errors, self.progress):
            table.pop(uid, None)
        self.registered.discard(uid)

    def observe(
        self,
        session: TrainingSession,
        *,
        now_us: int,
        models: Iterable[str],
        suspended: Iterable[str],
    ) -> Observed:
        uid = session_uid(session)
        return Observed(
            session=session,
            now_us=now_us,
            model_found=session.spec.base_model_ref.name in models,
            tenant_suspended=session.metadata.namespace in suspended,
            registered=uid in self.registered,
            seat=self.seats.get(uid),
            heartbeat=self.heartbeats.get(uid),
            meter_answers=group_of(session) not in self.meters_away,
            failures=self.failures.get(uid, WorkerFailures()),
            error=self.errors.get(uid, ""),
        )


def progress_of(heartbeat: Heartbeat) -> Progress:
    """Grows whenever the session got something done."""
    return heartbeat.head_seq, heartbeat.view.counts.total, heartbeat.snapshot_applied


def group_of(session: TrainingSession) -> GroupKey:
    return GroupKey(session.metadata.namespace, session.spec.base_model_ref.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a group of sessions needs running."""

    meter: bool = False
    worker: bool = False


def needs(
    sessions: Iterable[TrainingSession],
    seats: Mapping[SessionUid, Seat],
    heartbeats: Mapping[SessionUid, Heartbeat],
) -> dict[GroupKey, Need]:
    """Meters for all sessions that have a seat, workers for those of them that are not closed."""
    found: dict[GroupKey, Need] = {}
    for session in sessions:
        uid = session_uid(session)
        if uid not in seats:
            continue
        heartbeat = heartbeats.get(uid)
        closed = heartbeat is not None and heartbeat.view.state == "Closed"
        known = found.get(group_of(session), Need())
        found[group_of(session)] = Need(meter=True, worker=known.worker or not closed)
    return found


def blamed(
    sessions: Iterable[TrainingSession],
    seats: Mapping[SessionUid, Seat],
    heartbeats: Mapping[SessionUid, Heartbeat],
    key: GroupKey,
) -> list[TrainingSession]:
    """Sessions of a group that its worker may have run when it ended: not those known to be idle."""
    return [
        session
        for session in sessions
        if group_of(session) == key
        and session_uid(session) in seats
        and _may_have_run(session, heartbeats.get(session_uid(session)))
    ]


def _may_have_run(session: TrainingSession, heartbeat: Heartbeat | None) -> bool:
    if heartbeat is None or not conditions.is_true(session.status.conditions, conditions.STARTED):
        return True
    return heartbeat.view.state != "Closed" and heartbeat.view.open_operations != 0
