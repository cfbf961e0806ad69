"""How many usage events a second the ledger takes, with an fsync probe in the same run.

    PYTHONPATH=tests/support python benchmarks/ledger_ingest.py [--seconds 5] [--postgres]

A real ledger process; this process is its client, over loopback HTTP, on the same cores. PRODUCERS
meters, each of its own tenant, send batches one after the other; one event in a hundred was sent
before. After each measure the ledger must hold each event once, gapless: else the figure is void.
Floor: 8,000 events/s at batch 50 to 500 and a p99 of 40 ms; goal 25,000 and 20 ms.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from gristmill_contracts.http import ProducerCursor, RegisterProducer, UsageBatch
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import UsageEvent
from gristmill_testing.ledger import free_port, make_batch, make_event
from gristmill_testing.postgres import create_database, running_postgres

PRODUCERS = 8
BATCHES = (1, 50, 500)
DUPLICATE_EVERY = 100
PROBE_WRITES = 200


@dataclass(slots=True, kw_only=True)
class Measure:
    """One row of the table. Latencies are of whole requests, in milliseconds."""

    batch: int
    seconds: float = 0.0
    events: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    ledger_cpu_s: float = 0.0

    def row(self) -> str:
        ordered = sorted(self.latencies_ms)
        p50, p99 = (ordered[min(len(ordered) - 1, int(s * len(ordered)))] for s in (0.5, 0.99))
        per_million = self.ledger_cpu_s / self.events * 1e6
        return (
            f"{self.batch:>6} {self.events / self.seconds:>12,.0f} {p50:>9.2f} {p99:>9.2f} "
            f"{self.events:>9,} {per_million:>17.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measure")
    parser.add_argument("--postgres", action="store_true", help="a private durable PostgreSQL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = f"sqlite:///{folder}/ledger.sqlite3"
        if options.postgres:
            server = stack.enter_context(running_postgres(durable=True))
            url = create_database(server, "bench")
        print(f"database {url.split(':')[0]}, {PRODUCERS} producers, {os.cpu_count()} cores")
        print(probe_row(Path(folder)))
        print(f"{'batch':>6} {'events/s':>12} {'p50 ms':>9} {'p99 ms':>9} {'events':>9} "
              f"{'ledger CPU-s/1M':>17}")  # fmt: skip
        address, pid = stack.enter_context(ledger_process(url))
        for batch in BATCHES:
            print(asyncio.run(measure(address, pid, batch, options.seconds)).row(), flush=True)
        print(probe_row(Path(folder)))
        if not options.postgres:
            size = sum(path.stat().st_size for path in Path(folder).glob("ledger.sqlite3"))
            print(f"SQLite file: {size / 2**20:.1f} MiB")


def probe_row(folder: Path) -> str:
    """Append + fsync of 512 bytes, alone: the floor of any durable commit here and now."""
    times = []
    with (folder / "probe").open("ab", buffering=0) as file:
        for _ in range(PROBE_WRITES):
            started = time.perf_counter()
            file.write(b"x" * 512)
            os.fsync(file.fileno())
            times.append((time.perf_counter() - started) * 1000)
    times.sort()
    return f"fsync probe: p50 {times[len(times) // 2]:.2f} ms, p99 {times[-3]:.2f} ms"


@contextmanager
def ledger_process(url: str) -> Iterator[tuple[str, int]]:
    """Address and process id of a running ledger."""
    port = free_port()
    environment = dict(os.environ) | {
        "GRISTMILL_LEDGER_DATABASE_URL": url,
        "GRISTMILL_LEDGER_PORT": str(port),
        "GRISTMILL_LEDGER_LOG_LEVEL": "ERROR",
    }
    process = subprocess.Popen([sys.executable, "-m", "gristmill_ledger"], env=environment)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


async def measure(address: str, pid: int, batch: int, seconds: float) -> Measure:
    """Let all producers send for `seconds`, then check what the ledger holds."""
    found = Measure(batch=batch)
    async with aiohttp.ClientSession() as http:
        await until_ready(http, address)
        before_s, started = cpu_seconds(pid), time.perf_counter()
        sent = await asyncio.gather(
            *(produce(http, address, found, index, started + seconds) for index in range(PRODUCERS))
        )
        found.seconds = time.perf_counter() - started
        found.ledger_cpu_s = cpu_seconds(pid) - before_s
        for index, distinct in enumerate(sent):
            await check(http, address, name_of(batch, index), distinct)
    found.events = sum(sent)
    return found


async def until_ready(http: aiohttp.ClientSession, address: str) -> None:
    while True:
        try:
            async with http.get(f"{address}/readyz") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)


def name_of(batch: int, index: int) -> str:
    return f"bench-{batch}-{index}"


async def produce(
    http: aiohttp.ClientSession, address: str, found: Measure, index: int, end: float
) -> int:
    """Send batches until `end`; returns how many distinct events the ledger acknowledged."""
    name = name_of(found.batch, index)
    producer = RegisterProducer(
        producer=name,
        tenant=TenantName(name),
        session=SessionUid(name),
        epoch=1,
        attempt=1,
        head_seq=0,
    )
    await post(http, f"{address}/v1/producers", producer)
    acked = distinct = 0
    while time.perf_counter() < end:
        batch, fresh = next_batch(name, acked, found.batch)
        started = time.perf_counter()
        acked = await post(http, f"{address}/v1/usage/batches", batch)
        found.latencies_ms.append((time.perf_counter() - started) * 1000)
        distinct += fresh
    return distinct


def next_batch(name: str, acked: int, size: int) -> tuple[UsageBatch, int]:
    """The batch behind `acked`, and how many of its operations were not sent before."""
    now = now_us()
    events: list[UsageEvent] = []
    fresh = 0
    for seq in range(acked + 1, acked + size + 1):
        again = seq % DUPLICATE_EVERY == 0
        # The facts of an operation are the same each time that it is sent.
        number = seq - 1 if again else seq
        fresh += not again
        events.append(
            make_event(
                number,
                session=name,
                tenant=TenantName(name),
                producer_seq=seq,
                op_start_us=now - now % 10**9 + number,
            )
        )
    return make_batch(name, events), fresh


async def post(http: aiohttp.ClientSession, url: str, message: object) -> int:
    async with http.post(url, data=msgspec.msgpack.encode(message)) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}: {body!r}")
        return msgspec.msgpack.decode(body, type=ProducerCursor).acked_seq


async def check(http: aiohttp.ClientSession, address: str, tenant: str, distinct: int) -> None:
    """Exactly the distinct events are in the usage of the tenant."""
    async with http.get(f"{address}/v1/usage", params={"tenant": tenant}) as answer:
        rows = (await answer.json())["rows"]
    operations = sum(row["operations"] for row in rows)
    if operations != distinct:
        raise RuntimeError(f"{tenant}: {operations} operations for {distinct} sent: figures void")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
