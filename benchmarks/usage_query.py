"""How fast the ledger answers what dashboards ask, over 13 months of 1,000 tenants and 10M events.

    PYTHONPATH=tests/support python benchmarks/usage_query.py [--postgres] [--tenants 1000] [--rounds 30]

The sums by hour, day and month are loaded in bulk; the last hours of each tenant are posted as meters do, so
that the ends of a range are read from real rows. A real ledger process; this process is its client, over
loopback HTTP, on the same cores. Each question is asked ROUNDS times, each time of another tenant; the
answers over everything must hold each event once, else the figures are void.
"CPU ms" is of the ledger's process for one question (SQLite works in it, PostgreSQL does not): what it would
take on cores that nobody else uses. Floor: p99 of 200 ms for each question; goal 100 ms.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from sqlalchemy import Connection, insert, text

from gristmill_contracts.http import RegisterProducer
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_ledger.database import open_engine
from gristmill_ledger.migrate import migrate
from gristmill_ledger.rates import load_rates
from gristmill_ledger.rollups import DAY_US, HOUR_US, KEYS, MEASURES, hour_of, month_of
from gristmill_ledger.schema import rating as tables
from gristmill_testing.ledger import free_port, make_batch, make_event
from gristmill_testing.measuring import until_ready
from gristmill_testing.postgres import create_database, running_postgres

EVENTS: Final = 10_000_000
DAYS: Final = 396
SESSIONS: Final = 60
"""Of each tenant; each runs for HOURS hours and three kinds of operation."""
HOURS: Final = 3
SHARES: Final = (("forward_backward", 5), ("optim_step", 5), ("sample", 2))
POSTED: Final = 10
"""Rows of each tenant that are posted, at the end of the 13 months."""
ROWS_AT_ONCE: Final = 20_000
LEFT_OUT: Final = ("session", "project", "key", "operation")
"""What totals do not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """now_us: the end of the 13 months, at the middle of an hour."""

    tenants: int
    events: int
    now_us: int

    @property
    def since_us(self) -> int:
        return self.now_us - DAYS * 24 * HOUR_US


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--postgres", action="store_true", help="a private PostgreSQL")
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    now = now_us() - HOUR_US
    world = World(
        tenants=options.tenants,
        events=EVENTS // 1000 * options.tenants,
        now_us=now - now % HOUR_US + HOUR_US // 2,
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = f"sqlite:///{folder}/ledger.sqlite3"
        if options.postgres:
            url = create_database(stack.enter_context(running_postgres()), "bench")
        started = time.perf_counter()
        hours, months = load(url, world)
        print(f"database {url.split(':')[0]}, {os.cpu_count()} cores, {world.tenants} tenants, "
              f"{world.events:,} events in {hours:,} sums by hour and {months:,} by month, loaded in "
              f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
        address, pid = stack.enter_context(ledger_process(url))
        asyncio.run(measure(address, pid, world, options.rounds))


# --- what is there -------------------------------------------------------------------------------


def load(url: str, world: World) -> tuple[int, int]:
    """Fill the sums; returns how many there are by hour and by month."""
    engine = open_engine(url, busy_timeout_s=30, connections=1)
    migrate(engine)
    hours = months = 0
    with engine.begin() as connection:
        rate = load_rates(connection).identify("default", "tiny", world.now_us)
        batch: list[dict[str, Any]] = []
        monthly: list[dict[str, Any]] = []
        for index in range(world.tenants):
            rows, sums = tenant_rows(world, index, rate)
            batch += rows
            monthly += sums
            hours, months = hours + len(rows), months + len(sums)
            if len(batch) > ROWS_AT_ONCE or index == world.tenants - 1:
                put(connection, tables.usage_rollup_hourly, batch)
                put(connection, tables.usage_rollup_monthly, monthly)
                batch, monthly = [], []
    with engine.begin() as connection:
        for statement in totals_statements():
            connection.execute(text(statement))
        connection.execute(text("ANALYZE"))
    engine.dispose()
    return hours, months


def name_of(index: int) -> str:
    return f"tenant-{index:04d}"


def tenant_rows(
    world: World, index: int, rate: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A tenant's sums by hour and, added up, by month."""
    dice = random.Random(index)
    left = world.events // world.tenants
    cells = SESSIONS * HOURS * sum(share for _kind, share in SHARES)
    rows = []
    months: dict[tuple[Any, ...], Counter[str]] = {}
    for number in range(SESSIONS):
        start = world.since_us + dice.randrange(DAYS * 24 - HOURS - 3) * HOUR_US
        common = {
            "tenant": name_of(index),
            "session": f"{name_of(index)}-{number}",
            "project": dice.choice(("", "rl", "sft")),
            "key": dice.choice(("AKIA1", "AKIA2")),
            "model": dice.choice(("tiny", "large")),
        }
        for hour in range(HOURS):
            for kind, share in SHARES:
                events = world.events // world.tenants * share // cells
                left -= events
                last = number == SESSIONS - 1 and hour == HOURS - 1 and kind == SHARES[-1][0]
                row = sums_of(kind, events + (left if last else 0)) | common
                row |= {"bucket_us": hour_of(start + hour * HOUR_US), "rate": rate}
                rows.append(row)
                key = tuple(
                    "" if k in ("session", "project", "key") else row[k]
                    for k in KEYS
                    if k != "bucket_us"
                )
                month = months.setdefault((month_of(row["bucket_us"]), *key), Counter())
                month.update({name: row[name] for name in MEASURES})
    names = ("bucket_us", *(name for name in KEYS if name != "bucket_us"))
    sums = [
        dict(zip(names, key, strict=True)) | {name: found[name] for name in MEASURES}
        | {"through_seq": 1}
        for key, found in months.items()
    ]  # fmt: skip
    return rows, sums


def sums_of(kind: str, events: int) -> dict[str, Any]:
    tokens = dict.fromkeys(TOKEN_TYPES, 0)
    if kind == "sample":
        tokens |= {"prefill": 512 * events, "cached_prefill": 3584 * events, "sample": 900 * events}
    elif kind == "forward_backward":
        tokens |= {"train": 16_384 * events}
    withs = {f"{name}_with": events if tokens[name] else 0 for name in TOKEN_TYPES}
    fixed = {"kind": "usage", "odd": 0, "part": 0, "unknown": 0, "through_seq": 1}
    return {"operation": kind, "events": events} | tokens | withs | fixed


def totals_statements() -> Iterator[str]:
    """Make the totals of the sums: as a ledger does that was written to all the time."""
    keys = [name for name in KEYS if name != "bucket_us"]
    kept = [f"'' AS {name}" if name in LEFT_OUT else name for name in keys]
    sums = ", ".join(f"sum({name})" for name in MEASURES)
    names = ", ".join(("bucket_us", *keys, *MEASURES, "through_seq"))
    grouped = ", ".join(name for name in keys if name not in LEFT_OUT)
    for name, source, start in (
        ("daily", "usage_rollup_hourly", f"bucket_us - bucket_us % {DAY_US}"),
        ("monthly", "usage_rollup_monthly", "bucket_us"),
    ):
        yield (
            f"INSERT INTO usage_total_{name} ({names}) SELECT {start} AS start_us, {', '.join(kept)}, "
            f"{sums}, max(through_seq) FROM {source} GROUP BY start_us, {grouped}"
        )


def put(connection: Connection, table: Any, rows: list[dict[str, Any]]) -> None:
    """COPY where there is one, else rows one by one."""
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), rows)
        return
    names = table.c.keys()
    cursor: Any = connection.connection.cursor()
    with cursor.copy(f"COPY {table.name} ({', '.join(names)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row([row[name] for name in names])


# --- asking --------------------------------------------------------------------------------------


@contextmanager
def ledger_process(url: str) -> Iterator[tuple[str, int]]:
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


def questions(world: World, tenant: str, session: str) -> dict[str, dict[str, str | int]]:
    """What dashboards ask, by name."""
    year: dict[str, str | int] = {"since": world.since_us, "until": world.now_us}
    now = datetime.fromtimestamp(world.now_us / 1e6, UTC)
    month = int(now.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()) * 10**6
    days = world.now_us - int(timedelta(days=30).total_seconds()) * 10**6
    day = world.now_us - 24 * HOUR_US
    mine: dict[str, str | int] = {"tenant": tenant}
    return {
        "tenant, 13 months by month": year | mine | {"bucket": "month"},
        "tenant, 13 months by day in a zone": year | mine
        | {"bucket": "day", "zone": "Europe/Amsterdam"},
        "tenant, 13 months by model and operation": year | mine | {"group_by": "model,operation"},
        "tenant, 13 months by session": year | mine | {"group_by": "session"},
        "tenant, 30 days by day and token type": mine
        | {"since": days, "until": world.now_us, "bucket": "day", "group_by": "token_type"},
        "tenant, this month by project and key": mine | {"since": month, "group_by": "project,key"},
        "one session": mine | {"session": session, "group_by": "operation"},
        "all, 13 months by month": year | {"bucket": "month"},
        "all, 13 months by tenant": year | {"group_by": "tenant"},
        "all, this month by tenant and model": {"since": month, "group_by": "tenant,model"},
        "all, 13 months by day": year | {"bucket": "day"},
        "all, 13 months by operation": year | {"group_by": "operation"},
        "all, a day by hour": {"since": day, "until": world.now_us, "bucket": "hour"},
    }  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(address: str, pid: int, world: World, rounds: int) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await until_ready(http, address)
        await post_ends(http, address, world)
        await until_rated(http, address)
        await check(http, address, world)
        dice = random.Random(1)
        print(f"{'question':<44} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms':>8} {'rows':>6}")
        worst = 0.0
        for name in questions(world, "", ""):
            times, rows, before_s = [], 0, cpu_seconds(pid)
            for _ in range(rounds):
                tenant = name_of(dice.randrange(world.tenants))
                session = f"{tenant}-{dice.randrange(SESSIONS)}"
                started = time.perf_counter()
                rows = await ask(http, address, questions(world, tenant, session)[name])
                times.append((time.perf_counter() - started) * 1000)
            times.sort()
            p50, p99 = (times[min(len(times) - 1, int(s * len(times)))] for s in (0.5, 0.99))
            worst = max(worst, p99)
            cpu_ms = (cpu_seconds(pid) - before_s) / rounds * 1000
            print(f"{name:<44} {p50:>8.1f} {p99:>8.1f} {cpu_ms:>8.1f} {rows:>6,}", flush=True)
        print(f"worst p99: {worst:.1f} ms (floor 200, goal 100)")


async def ask(http: aiohttp.ClientSession, address: str, question: dict[str, str | int]) -> int:
    async with http.get(f"{address}/v1/usage", params=question) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{question} answered {answer.status}: {body!r}")
        return len(msgspec.json.decode(body)["rows"])


async def post_ends(http: aiohttp.ClientSession, address: str, world: World) -> None:
    """The last hours of each tenant, as its meter posts them."""
    for index in range(world.tenants):
        name = name_of(index)
        producer = RegisterProducer(
            producer=name, tenant=TenantName(name), session=SessionUid(f"{name}-0"), epoch=1,
            attempt=1, head_seq=0,
        )  # fmt: skip
        events = [
            make_event(
                number, session=f"{name}-0", tenant=TenantName(name),
                op_start_us=world.now_us - number * HOUR_US // 4,
            )
            for number in range(1, POSTED + 1)
        ]  # fmt: skip
        for path, message in (
            ("/v1/producers", producer),
            ("/v1/usage/batches", make_batch(name, events)),
        ):
            data = msgspec.msgpack.encode(message)
            async with http.post(address + path, data=data) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{path} answered {answer.status}: {await answer.read()!r}")


async def until_rated(http: aiohttp.ClientSession, address: str) -> None:
    while True:
        async with http.get(f"{address}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        if "gristmill_ledger_unrated_events 0.0" in lines:
            return
        await asyncio.sleep(0.2)


async def check(http: aiohttp.ClientSession, address: str, world: World) -> None:
    """Every event once, in whatever way it is added up."""
    for question in ({}, {"bucket": "month"}, {"bucket": "day"}):
        cursor: str | None = None
        operations = 0
        while True:
            parameters = question | ({"cursor": cursor} if cursor else {})
            async with http.get(f"{address}/v1/usage", params=parameters) as answer:
                page = await answer.json()
            operations += sum(row["operations"] for row in page["rows"])
            cursor = page["next_cursor"]
            if cursor is None:
                break
        expected = world.events + world.tenants * POSTED
        if operations != expected:
            raise RuntimeError(f"{question}: {operations} operations, not {expected}: figures void")


if __name__ == "__main__":
    main()
