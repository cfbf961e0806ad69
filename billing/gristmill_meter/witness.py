"""What the worker says that it ran, set beside what the log took of it. Pure: whoever calls it asks and waits.

The two can be compared at a moment at which no run is under way, or whenever they agree. A new opening at the
worker begins both anew, so that what ran with nobody left to hear of it is in neither.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from gristmill_contracts.http import WorkerStatus
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.reconciliation import (
    NOTHING,
    DeviceTime,
    LogPoint,
    ReconPoint,
    Tally,
    WorkerPoint,
    tally_name,
    tally_of,
    worker_differences,
)
from gristmill_meter.records import SessionState

QUARRELS_MAX: Final = 8
"""Earlier openings whose difference is still told, the newest ones."""

Mark = tuple[int, int]
"""An opening, and how often something began or ended in it."""


@dataclass(slots=True, kw_only=True)
class Witness:
    """Of one session, since this process opened it."""

    boot_id: str = ""
    opening: int = 0
    """0 = no worker, or one that tells nothing."""
    logged: dict[str, Tally] = field(default_factory=dict)
    cut_streams: int = 0
    under_way: int = 0
    changes: int = 0
    point: WorkerPoint | None = None
    waiting_since_us: int | None = None
    quarrels: deque[WorkerPoint] = field(default_factory=lambda: deque(maxlen=QUARRELS_MAX))
    devices: int = 0
    _device_us: int = 0
    """Of this opening, as the worker told last."""
    _device_before_us: int = 0
    _since_us: int | None = None
    _held_us: int = 0
    _looked_us: int | None = None

    # --- runs ------------------------------------------------------------------------------------

    def opened(self, boot_id: str, opening: int) -> None:
        """The worker has the session open anew: what was under way before is not counted any more."""
        if self.point is not None and worker_differences(self.point):
            self.quarrels.append(self.point)
        self._device_before_us += self._device_us
        self._device_us = 0
        self.boot_id, self.opening = boot_id, opening
        self.logged, self.cut_streams, self.under_way = {}, 0, 0
        self.changes += 1
        self.point, self.waiting_since_us = None, None

    def lost(self) -> None:
        """The worker, or an answer of it, is gone: nothing is compared until it has the session open anew."""
        self.opened("", 0)

    def begin(self) -> int:
        """A run is sent to the worker, under the opening that is returned."""
        self.under_way += 1
        self.changes += 1
        return self.opening

    def end(self, opening: int, kind: str = "", one: Tally | None = None) -> None:
        """It is logged as completed with `one`, or is over and was not completed: None."""
        if opening != self.opening:
            return
        self.under_way -= 1
        self.changes += 1
        if one is not None:
            self.logged[kind] = self.logged.get(kind, NOTHING) + one

    def cut(self, opening: int) -> None:
        """A token stream ended before its last token was logged."""
        if opening == self.opening:
            self.cut_streams += 1
        self.end(opening)

    # --- what the worker tells -------------------------------------------------------------------

    def mark(self) -> Mark:
        """Taken before the worker is asked, to know afterwards whether something happened meanwhile."""
        return (self.opening, self.changes if self.under_way == 0 else -1)

    def heard(self, mark: Mark, uid: SessionUid, status: WorkerStatus, at_us: int) -> None:
        """Set what the worker answered beside what was logged."""
        self.devices = status.devices
        told = status.tallies.get(uid)
        if told is None or (status.boot_id, told.opening) != (self.boot_id, self.opening):
            return
        self._device_us = sum(each.device_us for each in told.ran.values())
        point = WorkerPoint(
            boot_id=self.boot_id,
            opening=self.opening,
            ran=told.ran,
            logged=dict(self.logged),
            cut_streams=self.cut_streams,
            at_us=at_us,
        )
        quiet = self.under_way == 0 and mark == self.mark()
        if quiet or not worker_differences(point):
            self.point, self.waiting_since_us = point, None
        elif self.waiting_since_us is None:
            self.waiting_since_us = at_us

    # --- devices ---------------------------------------------------------------------------------

    def look(self, boottime_us: int, now_us: int, *, ready: bool) -> None:
        """Called now and then; between two looks that find the worker ready its devices were held."""
        if not ready:
            self._looked_us = None
            return
        if self._since_us is None:
            self._since_us = now_us
        if self._looked_us is not None:
            self._held_us += max(0, boottime_us - self._looked_us)
        self._looked_us = boottime_us

    def device_time(self) -> DeviceTime | None:
        """None before the worker was ready for the first time."""
        if self._since_us is None:
            return None
        return DeviceTime(
            since_us=self._since_us,
            held_us=self._held_us,
            devices=self.devices,
            busy_us=self._device_before_us + self._device_us,
        )

    # --- what is told ----------------------------------------------------------------------------

    def recon_point(self, state: SessionState, durable_number: int) -> ReconPoint:
        workers = list(self.quarrels)
        if self.point is not None:
            workers.append(self.point)
        return ReconPoint(
            log=log_point(state, durable_number),
            workers=workers,
            waiting_since_us=self.waiting_since_us,
        )


def log_point(state: SessionState, durable_number: int) -> LogPoint:
    """Sums of the usage that is durable: frames behind it may be lost, and their numbers used again."""
    told, seq = dict(state.told), state.head_seq
    for frame, event in reversed(state.events):
        if frame <= durable_number:
            break
        name = tally_name(event.kind, event.operation)
        told[name] = told[name] - tally_of(event.counts)
        seq -= 1
    return LogPoint(after=state.told_after, seq=seq, told=told)
