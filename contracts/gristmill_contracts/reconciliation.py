"""What worker, meter and ledger say of the same operations, so that they can be compared to the token.

A worker tells what it ran of a session since the session was opened there last (an *opening*); the meter
sets beside it what its log took of these runs, at a moment at which none was under way. Of its usage the
meter tells sums up to a sequence number that is durable: whoever holds that much can compare at any time
after. Nothing here names a prompt, a token or a client.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from gristmill_contracts.usage import Counts

STREAM_KIND: Final = "stream"
"""Kind of samples that ran as token streams: they are counted apart, for a stream may be cut."""


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """Sums over operations: how many, their tokens in the four disjoint types, their time on the device."""

    operations: int = 0
    prefill: int = 0
    cached_prefill: int = 0
    sample: int = 0
    train: int = 0
    device_us: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.operations + other.operations,
            self.prefill + other.prefill,
            self.cached_prefill + other.cached_prefill,
            self.sample + other.sample,
            self.train + other.train,
            self.device_us + other.device_us,
        )

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(
            self.operations - other.operations,
            self.prefill - other.prefill,
            self.cached_prefill - other.cached_prefill,
            self.sample - other.sample,
            self.train - other.train,
            self.device_us - other.device_us,
        )

    @property
    def tokens(self) -> tuple[int, int, int, int]:
        """In the order of `usage.TOKEN_TYPES`."""
        return (self.prefill, self.cached_prefill, self.sample, self.train)

    @property
    def is_even(self) -> bool:
        """Nothing in it but time: as a difference it is none."""
        return self.operations == 0 and not any(self.tokens)


Tallies = Mapping[str, Tally]
"""By kind of operation, or by what else is named."""
NOTHING: Final = Tally()


def tally_of(counts: Counts | None, device_us: int = 0) -> Tally:
    """One operation; None = nobody knows its tokens."""
    known = counts or Counts()
    return Tally(1, known.prefill, known.cached_prefill, known.sample, known.train, device_us)


def tally_name(usage_kind: str, operation: str) -> str:
    """What a sum of usage events is filed under."""
    return f"{usage_kind}/{operation}"


def differences(expected: Tallies, found: Tallies) -> dict[str, Tally]:
    """Found minus expected, by name, where that is not nothing."""
    names = sorted({*expected, *found})
    delta = {name: found.get(name, NOTHING) - expected.get(name, NOTHING) for name in names}
    return {name: each for name, each in delta.items() if not each.is_even}


class SessionTallies(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker process ran of a session since it was opened last: completed, no replays."""

    opening: int
    """Names that opening; grows in one worker process, so that runs of an earlier one are told apart."""
    ran: dict[str, Tally]
    """By kind of operation."""


class WorkerPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Worker and log at one moment: every answer that the worker gave had been logged, or was lost."""

    boot_id: str
    opening: int
    ran: dict[str, Tally]
    """As the worker told."""
    logged: dict[str, Tally]
    """What the log took of the same runs, by its own count."""
    cut_streams: int = 0
    """Token streams that ended before their last token: the log has what left, the worker what ran."""
    at_us: int


class LogPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of a log's usage events behind `after`, up to `seq`: all of them durable."""

    after: int
    """Events up to this one were not counted: their log is older than the count. 0 = all were."""
    seq: int
    told: dict[str, Tally]
    """By `tally_name` of usage kind and operation."""


class ReconPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a meter tells of a session to be reconciled: a part of its heartbeat."""

    log: LogPoint
    workers: list[WorkerPoint] = []
    """The newest of the running opening, and of earlier ones those that did not agree."""
    waiting_since_us: int | None = None
    """Since when the worker has told of runs that could not be set beside the log; None = they can."""


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """How long one attempt of a session held its worker's devices. A fact for us; nobody is billed by it."""

    since_us: int
    """When this meter had its worker first, by the clock of the meter. It names the stretch."""
    held_us: int
    """For how long since then; a worker that was away is not counted."""
    devices: int
    """Accelerators of the worker; 0 = it runs on the CPU."""
    busy_us: int
    """How long since then the worker's engine ran operations of the session that ended."""


def worker_differences(point: WorkerPoint) -> dict[str, Tally]:
    """What the log took minus what the worker ran. Nothing is forgiven but what a cut stream ran in vain.

    A stream that was cut is billed for what left, and its worker may have run some tokens more, or not have
    come to it. So where streams were cut, the log may hold less than ran, never more; and no fewer whole
    streams than ran besides the cut ones.
    """
    found = differences(point.ran, point.logged)
    stream = found.get(STREAM_KIND)
    if stream is not None and point.cut_streams:
        more = max(stream.operations, *stream.tokens) > 0
        if not more and stream.operations + point.cut_streams >= 0:
            del found[STREAM_KIND]
    return found
