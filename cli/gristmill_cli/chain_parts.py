"""A ledger's chains verified over HTTP by several processes: each fetches and verifies parts of its own."""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

from gristmill_cli.chain_source import LedgerChains
from gristmill_cli.cluster.ledger import LedgerAccess
from gristmill_cli.errors import CommandError
from gristmill_contracts import limits
from gristmill_contracts.chain.export import (
    Auditor,
    BrokenExportError,
    Item,
    Report,
    TenantReport,
    read_items,
)
from gristmill_contracts.chain.notes import SignedHead, VerifierKey
from gristmill_contracts.chain.parts import Found, Part, join, split
from gristmill_contracts.chain.walk import Walk
from gristmill_contracts.errors import InvalidRequestError

PART_ROWS: Final = 25 * limits.CHAIN_PAGE_ROWS
"""Rows of one task of a process: whole pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One part, and all that a process needs to verify it."""

    access: LedgerAccess
    part: Part
    first: bool
    """Begins where the chain begins, or behind a signed head."""
    keys: tuple[VerifierKey, ...]
    heads: tuple[SignedHead, ...]
    """Of the tenant, kept in a second place."""


def verify_parts(
    access: LedgerAccess,
    auditor: Auditor,
    *,
    lengths: dict[str, int],
    tenants: Sequence[str],
    starts: dict[str, int],
    jobs: int,
) -> Report:
    """Verify these tenants, or all, in so many processes at most; the auditor says by which keys and heads.

    lengths: rows of every tenant. starts: tenant -> number of a signed head to begin behind.
    """
    unknown = [name for name in tenants if name not in lengths]
    if unknown:
        raise CommandError(
            f"tenant {unknown[0]!r} has used nothing; known: {', '.join(lengths) or 'none'}"
        )
    names = sorted(tenants or lengths)
    tasks = [
        Task(
            access=access,
            part=part,
            first=index == 0,
            keys=tuple(auditor.keys),
            heads=tuple(head for head in auditor.heads if head.tenant == name),
        )
        for name in names
        for index, part in enumerate(split(name, starts.get(name, 0), lengths[name], PART_ROWS))
    ]
    rows = sum(max(0, lengths[name] - starts.get(name, 0)) for name in names)
    found: dict[str, list[Found]] = {name: [] for name in names}
    for each in _walked(tasks, 1 if rows <= PART_ROWS else jobs):
        found[each.part.tenant].append(each)
        auditor.rows += each.report.walk.rows
        auditor.progress(auditor.rows)
    return Report(tenants=[join(found[name]) for name in names])


def _walked(tasks: Sequence[Task], jobs: int) -> Iterator[Found]:
    if jobs == 1 or len(tasks) <= 1:
        yield from map(verify_part, tasks)
        return
    # Spawned: a forked copy of a process with threads may hang.
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(verify_part, task) for task in tasks]):
            yield future.result()


def verify_part(task: Task) -> Found:
    """Fetch and verify one part, up to its end or to its first fault."""
    part = task.part
    auditor = Auditor(keys=task.keys, heads=task.heads, joined=not task.first, last=part.last)
    begins: list[bytes] = []
    try:
        for body in LedgerChains(task.access).pages(part.tenant, part.after):
            auditor.feed(_noting(begins.append, body))
            report = auditor.reports[part.tenant]
            if report.fault is not None or report.walk.seq == part.last:
                break
    except InvalidRequestError as error:
        # The ledger has no row to begin behind. The part that ends there says what became of it.
        if task.first or begins or isinstance(error, BrokenExportError):
            raise
        walk = Walk(tenant=part.tenant, seq=part.after)
        report = TenantReport(walk=walk, first_seq=part.after + 1)
        return Found(part=part, begins=None, report=report, heads=frozenset())
    return Found(
        part=part,
        begins=begins[0],
        report=auditor.reports[part.tenant],
        heads=frozenset(auditor.noted),
    )


def _noting(note: Callable[[bytes], None], body: bytes) -> Iterator[Item]:
    """The items of a page; the hash that it begins behind is noted."""
    for item in read_items(io.BytesIO(body)):
        if item[0] == "tenant" and len(item) == 4:
            note(item[3])
        yield item
