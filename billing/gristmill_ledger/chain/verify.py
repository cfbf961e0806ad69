"""Verify a database itself, in parallel: each process walks a range of rows through its own connection.

A range begins with the hash that the row before it carries; whether that row deserves it, the range that
ends there says. So ranges need no order, and the first fault of a tenant is that of the lowest number.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from sqlite3 import Connection as SqliteConnection
from typing import Any, Final

from sqlalchemy import Connection

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.export import Report, TenantReport
from gristmill_contracts.chain.notes import ForgedHeadError, SignedHead, VerifierKey, open_note
from gristmill_contracts.chain.walk import BrokenChainError, Fault, Walk
from gristmill_contracts.errors import NotFoundError
from gristmill_ledger.chain.heads import notes_after
from gristmill_ledger.chain.pages import chain_heads, last_row, row_hash_at
from gristmill_ledger.chain.rows import Head
from gristmill_ledger.database import Database, open_engine

RANGE_ROWS: Final = 100_000
"""Rows of one task of a process, and of a range at most."""
NAMES: Final = ", ".join(encoding.COLUMNS)
SELECT: Final = (
    f"SELECT {NAMES} FROM usage_event WHERE tenant = {{0}} AND seq > {{1}} AND seq <= {{2}} "  # noqa: S608
    "ORDER BY seq"
)
SQLITE_ROWS: Final = SELECT.format("?", "?", "?")
POSTGRESQL_ROWS: Final = SELECT.format("%s", "%s", "%s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Rows of a tenant behind `after` up to `last`; the heads are those among them."""

    url: str
    tenant: str
    after: int
    after_hash: bytes
    last: int
    heads: tuple[SignedHead, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResult:
    """A range that was walked, up to its first fault."""

    task: Range
    walk: Walk
    fault: Fault | None


@dataclass(slots=True, kw_only=True)
class Plan:
    """What is to be verified of one tenant."""

    head: Head
    after: int = 0
    heads: list[SignedHead] = field(default_factory=list)
    fault: Fault | None = None
    """Of a signed head: found before any row is read."""


def verify_database(
    url: str,
    *,
    keys: Sequence[VerifierKey],
    tenants: Sequence[str] = (),
    jobs: int = 1,
    from_checkpoint: bool = False,
    kept: Sequence[SignedHead] = (),
    progress: Callable[[int, int], None] = lambda _done, _rows: None,
) -> Report:
    """Verify the chains of these tenants, or of all.

    from_checkpoint: only the rows behind the newest signed head. kept: heads from a second place.
    progress: is told how many rows are verified, and of how many. Raises NotFoundError for a tenant
    without a row.
    """
    database = Database(
        open_engine(url, busy_timeout_s=30, connections=1), readers=1, writes_pending_max=1
    )
    try:
        plans = database.read_now(lambda c: make_plans(c, keys, tenants, kept, from_checkpoint))
        ranges = database.read_now(lambda c: list(make_ranges(c, url, plans)))
    finally:
        database.close()
    rows = sum(each.last - each.after for each in ranges)
    results: dict[str, list[RangeResult]] = {plan.head.tenant: [] for plan in plans}
    done = 0
    for found in walk_bundles(list(bundles(ranges)), jobs):
        for result in found:
            results[result.task.tenant].append(result)
            done += result.walk.rows
        progress(done, rows)
    return Report(tenants=[merge(plan, results[plan.head.tenant]) for plan in plans])


def make_plans(
    connection: Connection,
    keys: Sequence[VerifierKey],
    tenants: Sequence[str],
    kept: Sequence[SignedHead],
    from_checkpoint: bool,
) -> list[Plan]:
    heads = {head.tenant: head for head in chain_heads(connection)}
    unknown = [name for name in tenants if name not in heads]
    if unknown:
        raise NotFoundError(
            f"tenant {unknown[0]!r} has no row; known: {', '.join(heads) or 'none'}"
        )
    plans = []
    for name in tenants or heads:
        plan = Plan(head=heads[name], heads=[head for head in kept if head.tenant == name])
        _read_notes(connection, plan, keys)
        if from_checkpoint and plan.fault is None:
            plan.after = max((head.seq for head in plan.heads), default=0)
        plans.append(plan)
    return plans


def _read_notes(connection: Connection, plan: Plan, keys: Sequence[VerifierKey]) -> None:
    """All signed heads of a tenant; without keys they prove nothing and are left out."""
    after = 0
    while keys:
        notes = notes_after(connection, plan.head.tenant, after, limits.CHAIN_PAGE_ROWS)
        for note in notes:
            try:
                head = open_note(note.text, keys)
            except ForgedHeadError as error:
                plan.fault = plan.fault or Fault(
                    tenant=note.tenant, seq=note.seq, event_id="", what=error.message
                )
            else:
                plan.heads.append(head)
        if len(notes) < limits.CHAIN_PAGE_ROWS:
            return
        after = notes[-1].seq


def make_ranges(connection: Connection, url: str, plans: Iterable[Plan]) -> Iterator[Range]:
    """The tasks, in the order of their rows. A range that begins behind a missing row is left to the
    one before it, which misses that row."""
    for plan in plans:
        tenant = plan.head.tenant
        start = plan.after
        digest: bytes | None = _start_hash(plan)
        # Rows beyond the ledger's own record are walked too: it would not own up to them.
        final = max(plan.head.seq, last_row(connection, tenant))
        for last in range(start + RANGE_ROWS, final + RANGE_ROWS, RANGE_ROWS):
            if digest is not None:
                end = min(last, final)
                heads = tuple(head for head in plan.heads if start < head.seq <= end)
                yield Range(
                    url=url, tenant=tenant, after=start, after_hash=digest, last=end, heads=heads
                )
            if last < final:
                start, digest = last, row_hash_at(connection, tenant, last)


def _start_hash(plan: Plan) -> bytes:
    signed = {head.seq: head.hash for head in plan.heads}
    return signed.get(plan.after, encoding.GENESIS) if plan.after else encoding.GENESIS


def bundles(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Ranges put together to tasks of some RANGE_ROWS rows: most tenants have few, and a connection for each
    would take longer than their rows."""
    bundle: list[Range] = []
    rows = 0
    for each in ranges:
        bundle.append(each)
        rows += each.last - each.after
        if rows >= RANGE_ROWS:
            yield bundle
            bundle, rows = [], 0
    if bundle:
        yield bundle


def walk_bundles(tasks: Sequence[Sequence[Range]], jobs: int) -> Iterator[list[RangeResult]]:
    """In this process where one job, or one task, is enough."""
    if jobs == 1 or len(tasks) <= 1:
        yield from map(walk_bundle, tasks)
        return
    # Spawned: a forked copy of a process with threads may hang.
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(walk_bundle, task) for task in tasks]):
            yield future.result()


def walk_bundle(task: Sequence[Range]) -> list[RangeResult]:
    """All ranges of a task through one connection."""
    engine = open_engine(task[0].url, busy_timeout_s=30, connections=1)
    pooled = engine.raw_connection()
    try:
        return [walk_range(each, pooled.driver_connection) for each in task]
    finally:
        pooled.close()
        engine.dispose()


def walk_range(task: Range, connection: Any) -> RangeResult:  # Any: of the driver
    walk = Walk(tenant=task.tenant, seq=task.after, hash=task.after_hash)
    fault = None
    try:
        with raw_rows(task, connection) as rows:
            walk.add(rows, task.heads)
        if walk.seq < task.last:
            what = f"the row is missing: the chain ends at row {walk.seq} of {task.last}"
            fault = Fault(tenant=task.tenant, seq=walk.seq + 1, event_id="", what=what)
    except BrokenChainError as error:
        fault = error.fault
    return RangeResult(task=task, walk=walk, fault=fault)


@contextmanager
def raw_rows(
    task: Range, connection: Any
) -> Iterator[Iterable[Any]]:  # Any: as the driver has them
    """The rows of a range straight from the driver, in one snapshot."""
    parameters = (task.tenant, task.after, task.last)
    if isinstance(connection, SqliteConnection):
        yield connection.execute(SQLITE_ROWS, parameters)
    elif task.last - task.after <= limits.CHAIN_PAGE_ROWS:
        with connection.cursor(binary=True) as cursor:
            yield cursor.execute(POSTGRESQL_ROWS, parameters)
    else:
        # Kept at the server and fetched page by page.
        with connection.cursor("verify", binary=True) as cursor:
            cursor.itersize = limits.CHAIN_PAGE_ROWS
            yield cursor.execute(POSTGRESQL_ROWS, parameters)


def merge(plan: Plan, results: Sequence[RangeResult]) -> TenantReport:
    """One report of a tenant's ranges: its sums, and its first fault."""
    ordered = sorted(results, key=lambda result: result.task.after)
    walk = Walk(tenant=plan.head.tenant, seq=plan.after, hash=_start_hash(plan))
    faults = [plan.fault, *(result.fault for result in ordered)]
    for result in ordered:
        walk.rows += result.walk.rows
        walk.unknown += result.walk.unknown
        walk.tokens = [
            one + more for one, more in zip(walk.tokens, result.walk.tokens, strict=True)
        ]
        walk.seq, walk.hash = result.walk.seq, result.walk.hash
    found = [fault for fault in faults if fault is not None]
    if not found:
        try:
            walk.finish(plan.heads, last=(plan.head.seq, plan.head.hash))
        except BrokenChainError as error:
            found = [error.fault]
    return TenantReport(
        walk=walk,
        first_seq=plan.after + 1,
        heads=len(plan.heads),
        signed_seq=max((head.seq for head in plan.heads), default=0),
        ended=True,
        fault=min(found, key=lambda fault: fault.seq, default=None),
    )
