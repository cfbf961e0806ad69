"""Volumes: they outlive meters, and lose at a crash what was not synced."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gristmill_contracts.ids import SessionUid
from gristmill_testing.fake_disk import FakeDisk
from gristmill_testing.fake_worker import Weights
from gristmill_testing.simulation.durable import DurableLog
from gristmill_testing.simulation.loop import PROCESS, Hung, Killed


@dataclass(slots=True, eq=False)
class Volume:
    """A disk that is mounted by one pod at a time, and the worker's snapshots on it.

    `power_left`: the machine loses power at the disk's next change but so many.
    """

    note: Callable[..., None]
    rng: random.Random
    disk: FakeDisk = field(default_factory=FakeDisk)
    snapshots: dict[str, list[Weights]] = field(default_factory=dict)
    power_left: int | None = None
    on_power_loss: Callable[[], None] = lambda: None
    destroyed: bool = False
    _hung: list[FakeDisk] = field(default_factory=list)
    _logs: dict[SessionUid, DurableLog] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._mount(self.disk)

    def _mount(self, disk: FakeDisk) -> None:
        self.disk = disk
        self.power_left = None
        disk.hook = lambda verb, path, content: self._change(disk, verb, path, content)

    def _change(self, disk: FakeDisk, verb: str, path: str, content: bytes) -> None:
        if disk is not self.disk:
            if any(disk is each for each in self._hung):
                raise Hung
            return  # Detached: `before` answers with an error.
        self.note("disk", verb, path, len(content))
        if self.power_left is None:
            return
        if self.power_left > 0:
            self.power_left -= 1
            return
        process = PROCESS.get()
        self.on_power_loss()
        if process is not None and process.dead:
            raise Killed

    def durable_log(self, uid: SessionUid) -> DurableLog:
        """What a session's log holds at this moment that a power cut would leave."""
        log = self._logs.setdefault(uid, DurableLog(uid))
        log.look(self.disk)
        return log

    def taken_away(self, *, hangs: bool) -> None:
        """From a pod that goes on: its writes fail from here on, or never return. What it has read stays."""
        if hangs:
            self._hung.append(self.disk)
        self.power_lost()

    def killed(self) -> None:
        """kill -9 of the meter: the page cache stays."""
        self._leave(self.disk.killed())

    def power_lost(self) -> None:
        """What was not synced is gone, or partly there."""
        torn = self.rng if self.rng.random() < 0.6 else None
        self._leave(self.disk.crash(torn))

    def _leave(self, successor: FakeDisk) -> None:
        """Whoever still holds the old disk gets errors from here on."""
        successor.free = self.disk.free
        self.disk.frozen = successor
        self._mount(successor)

    def successor(self) -> "Volume":
        """An empty volume in the place of this one, which is lost; whoever runs on it does not know."""
        self.destroyed = True
        return Volume(self.note, self.rng)
