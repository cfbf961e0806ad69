"""How many operations a second one hot budget reserves and settles, with an fsync probe in the same run.

    PYTHONPATH=tests/support python benchmarks/ledger_reserve.py [--seconds 5]

The ledger's own parts in this process, on SQLite and on a durable PostgreSQL: METERS meters of one tenant take a lease for
one operation each, and post its usage, one after the other. Real meters lease a hundred operations at
once; this is the worst case. Leases that wait share a commit, and so do batches of usage. In the end the
budget must hold what was posted and nothing reserved: else the figure is void.
Floor: 800 reserve + settle a second on PostgreSQL; goal 2,000.
"""

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gristmill_contracts.budgets import Lease, PutBudget, TakeLease
from gristmill_contracts.http import RegisterProducer, RegisterSession
from gristmill_contracts.ids import OpId, SessionUid, TenantName, event_id
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets.definitions import put_budget
from gristmill_ledger.budgets.desk import LeaseDesk
from gristmill_ledger.budgets.views import view_budget
from gristmill_ledger.coalesce import Coalescer
from gristmill_ledger.database import Database, open_engine
from gristmill_ledger.events import Post, store_batches
from gristmill_ledger.metrics import Metrics
from gristmill_ledger.migrate import migrate
from gristmill_ledger.producers import register_producer
from gristmill_ledger.registry import register_session
from gristmill_testing.ledger import make_batch, make_event
from gristmill_testing.postgres import create_database, running_postgres

METERS = 64
COST = 10
LIMIT = 10**15
PROBE_WRITES = 200


@dataclass(slots=True)
class Parts:
    """The ledger without HTTP."""

    database: Database
    desk: LeaseDesk
    coalescer: Coalescer


@dataclass(slots=True)
class Measure:
    operations: int = 0
    reserve_ms: list[float] = field(default_factory=list)
    settle_ms: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of the measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(running_postgres(durable=True))
        for url in (f"sqlite:///{folder}/ledger.sqlite3", create_database(server, "bench")):
            load = os.getloadavg()[0]
            name = url.split(":")[0]
            print(f"{name}, {METERS} meters, {os.cpu_count()} cores, load {load:.1f} before")
            print(probe_row(Path(folder)))
            asyncio.run(run(url, options.seconds))
            print(probe_row(Path(folder)), flush=True)


async def run(url: str, seconds: float) -> None:
    engine = open_engine(url, busy_timeout_s=30, connections=2)
    migrate(engine)
    database = Database(engine, readers=1, writes_pending_max=1024)
    commits: list[float] = []
    database.on_commit = commits.append
    parts = Parts(
        database,
        LeaseDesk(database=database, metrics=Metrics(), book="default", waiting_max=1024),
        Coalescer(database, partial(store_batches, book="default"), waiting_max=1024),
    )
    database.write_now(prepare)
    commits.clear()
    measure = Measure()
    started, cpu = time.monotonic(), time.process_time()
    end = started + seconds
    await asyncio.gather(*(meter(parts, n, end, measure) for n in range(METERS)))
    took, cpu = time.monotonic() - started, time.process_time() - cpu
    check(database, measure)
    database.close()
    print(
        f"reserve + settle: {measure.operations / took:,.0f} /s, {measure.operations:,} operations"
    )
    print(f"reserve {percentiles(measure.reserve_ms)}; settle {percentiles(measure.settle_ms)}")
    print(
        f"{len(commits):,} commits, {percentiles([each * 1e3 for each in commits])}; "
        f"{cpu / measure.operations * 1e3:.2f} CPU-ms of the ledger each"
    )


def prepare(connection: object) -> None:
    """One budget of one tenant, and its meters."""
    budget = PutBudget(scope_type="tenant", scope="acme", unit="tokens", limit=LIMIT)
    put_budget(connection, "acme", "hot", budget, by="cli", now_us=1)  # type: ignore[arg-type]
    for n in range(METERS):
        session = RegisterSession(
            uid=SessionUid(f"m-{n}"), tenant=TenantName("acme"), project="", name=f"m-{n}",
            model="tiny", rank=8, created_us=1,
        )  # fmt: skip
        register_session(connection, session)  # type: ignore[arg-type]
        producer = RegisterProducer(
            producer=f"m-{n}", tenant=TenantName("acme"), session=SessionUid(f"m-{n}"), epoch=1,
            attempt=1, head_seq=0,
        )  # fmt: skip
        register_producer(connection, producer)  # type: ignore[arg-type]


async def meter(parts: Parts, n: int, end: float, measure: Measure) -> None:
    session, number = SessionUid(f"m-{n}"), 0
    counts = Counts(train=COST)
    while time.monotonic() < end:
        number += 1
        begun = time.monotonic()
        request = TakeLease(
            session=session, attempt=1, seq=number, key="", model="tiny", need=counts, want=counts
        )
        lease = await parts.desk.take(request)
        reserved = time.monotonic()
        if not isinstance(lease, Lease):
            raise SystemExit(f"the budget denied a lease: {lease.message}")
        event = make_event(
            number, session=session, lease=lease.id, counts=counts, op_start_us=now_us(),
            op_end_us=now_us(), event_id=event_id(OpId(session, "log", number), "usage", 0),
        )  # fmt: skip
        await parts.coalescer.post(Post(batch=make_batch(f"m-{n}", [event]), attempt=1))
        measure.reserve_ms.append((reserved - begun) * 1e3)
        measure.settle_ms.append((time.monotonic() - reserved) * 1e3)
        measure.operations += 1


def check(database: Database, measure: Measure) -> None:
    """Each operation is posted once, and nothing is held any more."""
    period = database.read_now(lambda c: view_budget(c, "acme/hot", now_us())).period
    found = (period.posted, period.late_posted, period.reserved, period.suspense)
    if found != (measure.operations * COST, 0, 0, 0):
        raise SystemExit(f"void: the budget has {found} after {measure.operations} operations")


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p99 = (ordered[min(len(ordered) - 1, int(s * len(ordered)))] for s in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def probe_row(folder: Path) -> str:
    """What an fdatasync of 4 KiB costs here and now."""
    path = folder / "probe"
    taken = []
    with path.open("wb", buffering=0) as file:
        for _ in range(PROBE_WRITES):
            file.write(b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append((time.perf_counter() - began) * 1e3)
    path.unlink()
    return f"fdatasync probe: {percentiles(taken)}"


if __name__ == "__main__":
    main()
