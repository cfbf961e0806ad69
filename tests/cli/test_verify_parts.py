"""`gristmill verify` in parts: any split of a chain, in one process or in several, finds what one walk finds."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_cli import chain_parts
from gristmill_cli.chain_source import LedgerChains
from gristmill_cli.cluster.ledger import LedgerAccess
from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.export import TenantReport
from gristmill_contracts.chain.parts import Found, Part, join, split
from gristmill_contracts.chain.walk import Walk
from gristmill_testing.cli import Commands
from gristmill_testing.ledger import LedgerClient, make_event, running_ledger

ROWS = 9
PART, PAGE = 4, 2


@pytest.fixture
async def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LedgerClient]:
    """Pages of two rows and parts of four; acme's head was signed at rows 2, 4 and 9."""
    monkeypatch.setattr(limits, "CHAIN_PAGE_ROWS", PAGE)
    monkeypatch.setattr(chain_parts, "PART_ROWS", PART)
    async with running_ledger(tmp_path / "ledger") as client:
        for tenant in ("acme", "other"):
            await client.register(tenant, tenant=tenant, session=tenant)
        await fill(client, "acme", 1, 2)
        await sign(client)
        await fill(client, "acme", 3, 4)
        await sign(client)
        await fill(client, "acme", 5, ROWS)
        await sign(client)
        await fill(client, "other", 1, 3)
        yield client


async def fill(client: LedgerClient, tenant: str, first: int, last: int) -> None:
    events = [make_event(n, tenant=tenant, session=tenant) for n in range(first, last + 1)]
    await client.post(tenant, events)


async def sign(client: LedgerClient) -> None:
    status, _ = await client.call("POST", "/v1/chain/heads/acme")
    assert status == 200


def falsify(tmp_path: Path, statement: str) -> None:
    with sqlite3.connect(tmp_path / "ledger" / "ledger.sqlite3", isolation_level=None) as database:
        database.execute("DROP TRIGGER usage_event_no_UPDATE")
        database.execute("DROP TRIGGER usage_event_no_DELETE")
        database.execute(statement)
    database.close()


async def found(commands: Commands, ledger: LedgerClient, *options: str) -> Any:
    """What the command finds, as JSON, good or bad."""
    arguments = ["verify", "--ledger-url", ledger.url, "-o", "json", *options]
    result = await asyncio.to_thread(commands.run, *arguments)
    assert result.exit_code in {0, 3}, result.output
    answer = json.loads(result.stdout)
    assert answer["ok"] == (result.exit_code == 0)
    return answer


async def both(commands: Commands, ledger: LedgerClient, *options: str) -> Any:
    """What is found in parts, once one walk in order has found the same."""
    in_parts = await found(commands, ledger, "--jobs", "1", *options)
    with pytest.MonkeyPatch.context() as older:
        older.setattr(LedgerChains, "lengths", lambda _self: None)
        in_order = await found(commands, ledger, *options)
    assert in_parts == in_order
    return in_parts


async def test_a_whole_chain(commands: Commands, ledger: LedgerClient) -> None:
    acme, other = (await both(commands, ledger))["tenants"]
    assert (acme["rows"], acme["heads"], acme["signed_seq"]) == (ROWS, 3, ROWS)
    assert acme["tokens"]["cached_prefill"] == 20 * ROWS
    assert (other["rows"], other["heads"]) == (3, 0)


@pytest.mark.parametrize("seq", [1, 2, 4, 5, 8, 9])
async def test_a_changed_row_is_named_wherever_the_parts_meet(
    commands: Commands, ledger: LedgerClient, tmp_path: Path, seq: int
) -> None:
    falsify(tmp_path, f"UPDATE usage_event SET n = 7 WHERE tenant = 'acme' AND seq >= {seq}")
    acme, other = (await both(commands, ledger))["tenants"]
    assert (acme["fault"]["seq"], acme["rows"], other["ok"]) == (seq, seq - 1, True)


@pytest.mark.parametrize("seq", [1, 4, 5, 8, 9])
async def test_a_missing_row_is_named_wherever_the_parts_meet(
    commands: Commands, ledger: LedgerClient, tmp_path: Path, seq: int
) -> None:
    falsify(tmp_path, f"DELETE FROM usage_event WHERE tenant = 'acme' AND seq = {seq}")
    acme, _ = (await both(commands, ledger))["tenants"]
    assert acme["fault"]["seq"] == seq
    assert "missing" in acme["fault"]["what"]


async def test_behind_a_checkpoint(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    await fill(ledger, "acme", ROWS + 1, ROWS + 6)
    falsify(tmp_path, "UPDATE usage_event SET n = 7 WHERE tenant = 'acme' AND seq = 3")
    answer = await both(commands, ledger, "--from-checkpoint", "-t", "acme")
    (acme,) = answer["tenants"]
    assert (acme["ok"], acme["first_seq"], acme["rows"]) == (True, ROWS + 1, 6)


async def test_several_processes_find_the_same(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    assert await found(commands, ledger, "-j", "2") == await found(commands, ledger, "-j", "1")
    falsify(tmp_path, "UPDATE usage_event SET n = 7 WHERE tenant = 'acme' AND seq = 6")
    answer = await found(commands, ledger, "-j", "2")
    assert answer == await found(commands, ledger, "-j", "1")
    assert answer["tenants"][0]["fault"]["seq"] == 6


async def test_a_tenant_that_there_is_not_is_told(commands: Commands, ledger: LedgerClient) -> None:
    result = await asyncio.to_thread(
        commands.run, "verify", "--ledger-url", ledger.url, "-t", "nobody"
    )
    assert (result.exit_code, "known: acme, other" in result.output) == (1, True)


async def test_a_ledger_that_tells_no_lengths_is_verified_in_order(ledger: LedgerClient) -> None:
    chains = LedgerChains(LedgerAccess(url=ledger.url, headers={}))
    older = LedgerChains(LedgerAccess(url=f"{ledger.url}/older", headers={}))
    lengths = await asyncio.to_thread(chains.lengths)
    assert lengths == {"acme": ROWS, "other": 3}
    assert await asyncio.to_thread(older.lengths) is None


@pytest.mark.parametrize(
    ("after", "rows", "parts"),
    [
        (0, 0, [(0, None)]),
        (0, 4, [(0, None)]),
        (0, 5, [(0, 4), (4, None)]),
        (0, 9, [(0, 4), (4, 8), (8, None)]),
        (3, 9, [(3, 7), (7, None)]),
        (9, 9, [(9, None)]),
    ],
)
def test_parts_lie_side_by_side(after: int, rows: int, parts: list[tuple[int, int | None]]) -> None:
    assert [(each.after, each.last) for each in split("acme", after, rows, PART)] == parts


def part_of(after: int, seq: int, digest: bytes, begins: bytes | None) -> Found:
    walk = Walk(tenant="acme", seq=seq, hash=digest, rows=seq - after)
    report = TenantReport(walk=walk, first_seq=after + 1)
    part = Part(tenant="acme", after=after, last=None)
    return Found(part=part, begins=begins, report=report, heads=frozenset())


@pytest.mark.parametrize(
    ("second", "seq", "what"),
    [
        (part_of(4, 9, b"c", b"other"), 4, "another hash"),
        (part_of(4, 4, b"", None), 4, "missing"),
        (part_of(6, 9, b"c", b"b"), 5, "ends at row 4"),
    ],
)
def test_what_a_ledger_tells_of_the_row_between_two_parts_is_not_believed(
    second: Found, seq: int, what: str
) -> None:
    first = part_of(0, 4, b"b", encoding.GENESIS)
    good = join([part_of(4, 9, b"c", b"b"), part_of(0, 4, b"b", encoding.GENESIS)])
    assert (good.fault, good.walk.seq, good.walk.rows, good.walk.hash) == (None, 9, 9, b"c")
    fault = join([second, first]).fault
    assert fault is not None
    assert (fault.seq, what in fault.what) == (seq, True)
