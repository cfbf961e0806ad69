"""What benchmarks have in common: milliseconds with their quantiles, and a ledger that is waited for."""

import asyncio
import statistics
from dataclasses import dataclass, field

import aiohttp


@dataclass(slots=True)
class Timings:
    """Milliseconds of one thing, in the order measured."""

    name: str
    per_round: int
    """How many are taken one after the other, before something else is measured."""
    values_ms: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.values_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def quietest(self) -> float:
        """Median of the quickest round: what it takes when nobody else wants the processor."""
        starts = range(0, len(self.values_ms), self.per_round)
        return min(statistics.median(self.values_ms[at : at + self.per_round]) for at in starts)

    def row(self, name_chars: int) -> str:
        """Name, p50, p90, p99, quietest round, count."""
        figures = (*(self.quantile(share) for share in (0.5, 0.9, 0.99)), self.quietest)
        cells = "".join(f" {value:>9.2f}" for value in figures)
        return f"{self.name:<{name_chars}}{cells} {len(self.values_ms):>7}"


async def until_ready(http: aiohttp.ClientSession, address: str) -> None:
    """Wait for a process that has just been started to say that it is ready."""
    while True:
        try:
            async with http.get(f"{address}/readyz") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)
