"""Thousands of operations of all kinds at one worker process, and what its memory and speed do meanwhile."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gristmill_contracts.operations import (
    ComputeLogprobs,
    Forward,
    ForwardBackward,
    LoadState,
    Operation,
    SaveResult,
    SaveState,
    SaveWeights,
    tensor,
)
from gristmill_testing.bare_worker import BareWorker
from gristmill_testing.local_runner import datum, ref, sample, step
from gristmill_testing.processor import cpu_s

WINDOW_S = 60.0
SAVE_EVERY = 100
SNAPSHOT_EVERY = 50


@dataclass(frozen=True, slots=True)
class Reading:
    at_s: float
    operations: int
    rss_bytes: int
    cpu_s: float
    """Processor time of the worker so far."""


@dataclass(slots=True)
class Soak:
    """Readings in the order of time."""

    readings: list[Reading] = field(default_factory=list)

    @property
    def window_s(self) -> float:
        """A minute; a fifth of a run that is shorter than five."""
        return min(WINDOW_S, self.readings[-1].at_s / 5)

    def after_warm_up(self) -> list[Reading]:
        return [each for each in self.readings if each.at_s >= self.window_s]

    def growth_mb_per_minute(self) -> float:
        """Slope of the line through RSS after warm-up, by least squares."""
        kept = self.after_warm_up()
        slope, _ = statistics.linear_regression(
            [each.at_s / 60 for each in kept], [each.rss_bytes / 1e6 for each in kept]
        )
        return slope

    def speed_ratio(self) -> float:
        """Operations a second in the last window against the second one."""
        second, last = self._windows()
        return _rate(last, "at_s") / _rate(second, "at_s")

    def cpu_speed_ratio(self) -> float:
        """The same for each second of processor time: other processes matter less."""
        second, last = self._windows()
        return _rate(last, "cpu_s") / _rate(second, "cpu_s")

    def _windows(self) -> tuple[list[Reading], list[Reading]]:
        end = self.readings[-1].at_s
        return self._inside(self.window_s, 2 * self.window_s), self._inside(
            end - self.window_s, end
        )

    def _inside(self, start_s: float, end_s: float) -> list[Reading]:
        return [each for each in self.readings if start_s <= each.at_s <= end_s]


def _rate(inside: Sequence[Reading], clock: str) -> float:
    seconds: float = getattr(inside[-1], clock) - getattr(inside[0], clock)
    return (inside[-1].operations - inside[0].operations) / seconds


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} tells no VmRSS")


def operations(turn: int, saved: Sequence[SaveResult]) -> Iterator[Operation]:
    """One turn: lengths change from turn to turn, so that caches of every length come and go."""
    lengths = [4 + (7 * turn + 13 * at) % 60 for at in range(3)]
    rows = [datum([1 + (turn + at + j) % 500 for j in range(n)]) for at, n in enumerate(lengths)]
    yield ForwardBackward(loss="cross_entropy", loss_config={}, datums=rows)
    yield step(1e-4)
    yield Forward(loss="cross_entropy", loss_config={}, datums=rows[:1])
    adapter = ref(saved[turn % len(saved)]) if saved else None
    prompt = [1 + (turn + at) % 500 for at in range(lengths[0])]
    yield sample(prompt, num_samples=1 + turn % 4, max_tokens=1 + turn % 12, adapter=adapter)
    yield ComputeLogprobs(prompt=tensor("int64", prompt), topk=turn % 3, adapter=adapter)


def soak(worker: BareWorker, count: int) -> Soak:
    """Run `count` operations on an open session; a snapshot and saves among them."""
    found, started, done, turn = Soak(), time.monotonic(), 0, 0
    saved: list[SaveResult] = []
    while done < count:
        for operation in operations(turn, saved):
            worker.execute(operation)
            done += 1
        turn += 1
        if turn % SNAPSHOT_EVERY == 0:
            worker.snapshot()
        if turn % SAVE_EVERY == 1:
            weights = worker.execute(SaveWeights(location="soak/w", merge=False, description=""))
            state = worker.execute(SaveState(location="soak/s", description=""))
            assert isinstance(weights, SaveResult)
            assert isinstance(state, SaveResult)
            worker.execute(LoadState(checkpoint=ref(state), with_optimizer=True))
            saved = [*saved[-3:], weights]
            done += 3
        now = time.monotonic() - started
        found.readings.append(Reading(now, done, rss_bytes(worker.pid), cpu_s(worker.pid)))
    return found
