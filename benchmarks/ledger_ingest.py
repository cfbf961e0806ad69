"""How many usage events a second the ledger takes, with an fdatasync probe in the same run.

    PYTHONPATH=tests/support python benchmarks/ledger_ingest.py [--seconds 5] [--database sqlite]

A real ledger process with everything on: dedupe, chain, budgets, rating behind it, its own verification.
This process is its client, over loopback HTTP, on the same cores. SENDERS meters send batch after batch,
for one tenant, for one each, and for a thousand; one event in a hundred was sent before, one in a
thousand disagrees with an id that is taken. After each measure the ledger must hold each event once,
gapless and chained, and each conflict as a dead letter: else the figure is void.
"p50" and "p99" are of a request, which waits for the commits of others; "commit50" and "commit99" are of
any writing transaction of the ledger while it is measured (batches and what rates them behind), begin to
durable end; "CPU-s/1M" is the ledger's own processor time for a million events.
Floors: 8,000 events/s at batch 50 to 500, p99 of a commit 40 ms, 100,000 rows/s verified; goals 25,000,
20 ms, 300,000.
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
from typing import Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from gristmill_contracts import metrics
from gristmill_contracts.http import ProducerCursor, RegisterProducer, UsageBatch
from gristmill_contracts.ids import OpId, SessionUid, TenantName, event_id
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import Counts, UsageEvent
from gristmill_ledger.chain.verify import verify_database
from gristmill_ledger.database import open_engine
from gristmill_testing.ledger import free_port
from gristmill_testing.measuring import until_ready
from gristmill_testing.postgres import create_database, running_postgres

SENDERS: Final = 8
SHAPES: Final = ((8, 1), (8, 50), (8, 500), (1, 1), (1, 50), (1, 500), (1000, 50))
"""Tenants and events of a batch."""
DUPLICATE_EVERY: Final = 100
CONFLICT_EVERY: Final = 1000
PROBE_WRITES: Final = 200
OPERATIONS: Final = ("forward_backward", "sample", "optim_step", "forward")


@dataclass(slots=True, kw_only=True)
class Producer:
    """A meter's log, as far as it was acknowledged."""

    name: str
    tenant: str
    acked: int = 0
    distinct: int = 0
    conflicts: int = 0


@dataclass(slots=True, kw_only=True)
class Measure:
    """One row of the table. Times in milliseconds."""

    tenants: int
    batch: int
    seconds: float = 0.0
    events: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    commits_ms: tuple[float, float] = (0.0, 0.0)

    def row(self) -> str:
        ordered = sorted(self.latencies_ms)
        p50, p99 = (ordered[min(len(ordered) - 1, int(s * len(ordered)))] for s in (0.5, 0.99))
        commit50, commit99 = self.commits_ms
        return (
            f"{self.tenants:>7} {self.batch:>6} {self.events / self.seconds:>10,.0f} {p50:>8.1f} "
            f"{p99:>8.1f} {commit50:>9.1f} {commit99:>9.1f} {self.cpu_s / self.events * 1e6:>9.1f}"
        )


HEADING: Final = (
    f"{'tenants':>7} {'batch':>6} {'events/s':>10} {'p50 ms':>8} {'p99 ms':>8} {'commit50':>9} "
    f"{'commit99':>9} {'CPU-s/1M':>9}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measure")
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    options = parser.parse_args()
    names = ("sqlite", "postgresql") if options.database == "both" else (options.database,)
    for name in names:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            url = f"sqlite:///{folder}/ledger.sqlite3"
            if name == "postgresql":
                server = stack.enter_context(running_postgres(durable=True))
                url = create_database(server, "bench")
            run(url, Path(folder), options.seconds)


def run(url: str, folder: Path, seconds: float) -> None:
    """All measures on one database, then what it weighs and how fast it is verified."""
    print(f"database {url.partition(':')[0]}, {SENDERS} senders, {os.cpu_count()} cores")
    print(f"{probe_row(folder)}\n{HEADING}")
    rows = 0
    with ledger_process(url, folder) as (address, pid):
        for tenants, batch in SHAPES:
            found = Measure(tenants=tenants, batch=batch)
            asyncio.run(measure(url, address, pid, found, seconds))
            rows += found.events
            print(found.row(), flush=True)
        print(f"ledger memory: {memory_mb(pid):.0f} MB resident")
    print(probe_row(folder))
    print(f"{size_bytes(url) / rows:,.0f} bytes/event, indices included, {rows:,} events")
    for jobs in (1, os.cpu_count() or 1):
        started = time.perf_counter()
        report = verify_database(url, keys=[], jobs=jobs)
        spent = time.perf_counter() - started
        if not report.ok or report.rows != rows:
            raise RuntimeError(f"the chain is not as it must be: {report.faults()}: figures void")
        print(f"verify, {jobs} processes: {report.rows / spent:,.0f} rows/s")


def probe_row(folder: Path) -> str:
    """Append + fdatasync of 512 bytes, alone: the floor of any durable commit here and now."""
    times = []
    with (folder / "probe").open("ab", buffering=0) as file:
        for _ in range(PROBE_WRITES):
            started = time.perf_counter()
            file.write(b"x" * 512)
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - started) * 1000)
    times.sort()
    return f"fdatasync probe: p50 {times[len(times) // 2]:.2f} ms, p99 {times[-3]:.2f} ms"


@contextmanager
def ledger_process(url: str, folder: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a running ledger."""
    port = free_port()
    environment = dict(os.environ) | {
        "GRISTMILL_LEDGER_DATABASE_URL": url,
        "GRISTMILL_LEDGER_DATA_DIR": str(folder / "data"),
        "GRISTMILL_LEDGER_PORT": str(port),
        "GRISTMILL_LEDGER_LOG_LEVEL": "ERROR",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gristmill_ledger"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


async def measure(url: str, address: str, pid: int, found: Measure, seconds: float) -> None:
    """Let all senders send for `seconds`, then check what the ledger holds."""
    tenants, batch = found.tenants, found.batch
    producers = [
        Producer(
            name=f"p-{tenants}-{batch}-{index}", tenant=f"t-{tenants}-{batch}-{index % tenants}"
        )
        for index in range(max(SENDERS, tenants))
    ]
    async with aiohttp.ClientSession() as http:
        await until_ready(http, address)
        for producer in producers:
            await register(http, address, producer)
        before_s, before = cpu_seconds(pid), await commits(http, address)
        started = time.perf_counter()
        await asyncio.gather(
            *(
                send(http, address, found, producers[index::SENDERS], started + seconds)
                for index in range(SENDERS)
            )
        )
        found.seconds = time.perf_counter() - started
        found.cpu_s = cpu_seconds(pid) - before_s
        after = await commits(http, address)
    found.commits_ms = percentiles(before, after)
    found.events = sum(producer.distinct for producer in producers)
    check(url, producers)


async def register(http: aiohttp.ClientSession, address: str, producer: Producer) -> None:
    message = RegisterProducer(
        producer=producer.name,
        tenant=TenantName(producer.tenant),
        session=SessionUid(producer.name),
        epoch=1,
        attempt=1,
        head_seq=0,
    )
    await post(http, f"{address}/v1/producers", message)


async def send(
    http: aiohttp.ClientSession,
    address: str,
    found: Measure,
    producers: list[Producer],
    end: float,
) -> None:
    """Batch after batch, of one producer after the other."""
    turn = 0
    while time.perf_counter() < end:
        producer = producers[turn % len(producers)]
        turn += 1
        batch = next_batch(producer, found.batch)
        started = time.perf_counter()
        producer.acked = await post(http, f"{address}/v1/usage/batches", batch)
        found.latencies_ms.append((time.perf_counter() - started) * 1000)


def next_batch(producer: Producer, size: int) -> UsageBatch:
    """The batch behind what was acknowledged; counts what the ledger is to make of it."""
    events = [
        make_event(producer, seq) for seq in range(producer.acked + 1, producer.acked + size + 1)
    ]
    return UsageBatch(
        producer=producer.name, epoch=1, first_seq=events[0].producer_seq, events=events
    )


def make_event(producer: Producer, seq: int) -> UsageEvent:
    """Number `seq` of a log; now and then one that was sent before, or contradicts one."""
    number, tokens = seq, 1000
    if seq % CONFLICT_EVERY == 0:
        number, tokens = seq - 1, 2000
        producer.conflicts += 1
    elif seq % DUPLICATE_EVERY == 0:
        number = seq - 1
    else:
        producer.distinct += 1
    # The facts of an operation are the same each time that it is sent.
    start_us = START_US + number
    session = SessionUid(producer.name)
    return UsageEvent(
        event_id=event_id(OpId(session, "train", number), "usage"),
        producer_seq=seq,
        kind="usage",
        n=0,
        tenant=TenantName(producer.tenant),
        session=session,
        stream="train",
        number=number,
        operation=OPERATIONS[number % len(OPERATIONS)],
        model="tiny",
        project="bench",
        attempt=1,
        outcome="completed",
        counts=Counts(train=tokens),
        op_start_us=start_us,
        op_end_us=start_us + 1000,
        key="GMBENCHBENCHBENCHBEN",
    )


START_US: Final = now_us() - 3_600_000_000


async def post(http: aiohttp.ClientSession, url: str, message: object) -> int:
    async with http.post(url, data=msgspec.msgpack.encode(message)) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}: {body!r}")
        return msgspec.msgpack.decode(body, type=ProducerCursor).acked_seq


async def commits(http: aiohttp.ClientSession, address: str) -> dict[float, float]:
    """Upper bound of each bucket -> commits that took no longer, so far."""
    async with http.get(f"{address}/metrics") as answer:
        exposition = await answer.text()
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == f"{metrics.LEDGER_COMMIT_SECONDS}_bucket"
    }


def percentiles(before: dict[float, float], after: dict[float, float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds, within a bucket as if it were filled evenly."""
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    total = max(counts.values())
    found = []
    for share in (0.5, 0.99):
        below, lower = 0.0, 0.0
        for bound, count in counts.items():
            if count >= share * total:
                inside = (share * total - below) / (count - below) if count > below else 1.0
                upper = bound if bound != float("inf") else lower
                found.append((lower + inside * (upper - lower)) * 1000)
                break
            below, lower = count, bound
    return found[0], found[1]


def check(url: str, producers: list[Producer]) -> None:
    """Each distinct event once, gapless; each conflict a dead letter; or RuntimeError."""
    engine = open_engine(url, busy_timeout_s=60, connections=1)
    tenants = {producer.tenant for producer in producers}
    with engine.connect() as connection:
        rows = {
            row.tenant: (row.count, row.last)
            for row in connection.execute(
                text(
                    "SELECT tenant, count(*) AS count, max(seq) AS last FROM usage_event GROUP BY tenant"
                )
            )
        }
        letters = dict(
            connection.execute(
                text("SELECT tenant, count(*) FROM dead_letter GROUP BY tenant")
            ).all()
        )
    engine.dispose()
    for tenant in tenants:
        own = [producer for producer in producers if producer.tenant == tenant]
        distinct = sum(producer.distinct for producer in own)
        conflicts = sum(producer.conflicts for producer in own)
        found = (*rows.get(tenant, (0, None)), letters.get(tenant, 0))
        if found != (distinct, distinct or None, conflicts):
            raise RuntimeError(
                f"{tenant}: rows, last number and dead letters are {found}, not "
                f"{(distinct, distinct, conflicts)}: figures void"
            )


def size_bytes(url: str) -> int:
    """What the rows of usage and their indices take on disk."""
    engine = open_engine(url, busy_timeout_s=60, connections=1)
    query = "SELECT pg_total_relation_size('usage_event')"
    if engine.dialect.name == "sqlite":
        query = "SELECT sum(pgsize) FROM dbstat WHERE name LIKE '%usage_event%'"
    with engine.connect() as connection:
        size = int(connection.execute(text(query)).scalar_one())
    engine.dispose()
    return size


def memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
