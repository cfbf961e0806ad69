"""What runs beside the writers takes little at a time while somebody waits for a commit."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest
import uvicorn
from sqlalchemy import Connection

from gristmill_contracts import limits
from gristmill_contracts.chain.walk import Walk
from gristmill_ledger import database as module
from gristmill_ledger.__main__ import COLLECT_AFTER, LedgerServer
from gristmill_ledger.app import make_app
from gristmill_ledger.chain import keeper as keeper_module
from gristmill_ledger.chain.keeper import Keeper
from gristmill_ledger.chain.pages import walk_page
from gristmill_ledger.database import Database
from gristmill_ledger.follower import Follower
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.metrics import Metrics
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.falsified import fill_chain

LONG_S, NEVER_S = 1e9, 0.0
ROWS = 9


def nothing(_connection: Connection) -> None:
    """A write that changes nothing."""


@pytest.mark.parametrize(("since_s", "busy"), [(LONG_S, True), (NEVER_S, False)])
async def test_a_ledger_is_busy_for_a_while_after_a_write_that_somebody_waited_for(
    database: Database, monkeypatch: pytest.MonkeyPatch, since_s: float, busy: bool
) -> None:
    monkeypatch.setattr(module, "BUSY_S", since_s)
    assert not database.busy
    await database.write(nothing, behind=True)
    assert not database.busy
    await database.write(nothing)
    assert database.busy == busy


async def test_a_ledger_is_busy_while_a_write_runs(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_S", NEVER_S)
    may_end = threading.Event()
    running = asyncio.create_task(database.write(lambda _: may_end.wait(60)))
    await asyncio.sleep(0)
    assert database.busy
    may_end.set()
    await running
    assert not database.busy


@pytest.mark.parametrize("busy", [True, False])
async def test_rating_takes_few_rows_at_a_time_while_others_write(
    database: Database, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    fill_chain(database, rows=ROWS)
    monkeypatch.setattr(limits, "RATING_ROWS_BUSY_MAX", 2)
    monkeypatch.setattr(module, "BUSY_S", LONG_S if busy else NEVER_S)
    await database.write(nothing)
    follower = Follower(database=database, metrics=Metrics(), book="default")
    first = await follower._step()
    assert (first.rows, first.more) == ((2, True) if busy else (ROWS, False))
    assert first.rows + await follower.catch_up() == ROWS


@pytest.mark.parametrize("busy", [True, False])
async def test_the_chain_is_verified_in_short_pages_while_others_write(
    database: Database, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    fill_chain(database, rows=ROWS)
    pages: list[int] = []

    def noting(connection: Connection, walk: Walk, last: int, rows_max: int) -> None:
        before = walk.seq
        walk_page(connection, walk, last, rows_max)
        pages.append(walk.seq - before)

    monkeypatch.setattr(keeper_module, "walk_page", noting)
    monkeypatch.setattr(limits, "CHAIN_PAGE_BUSY_ROWS", 4)
    monkeypatch.setattr(module, "BUSY_S", LONG_S if busy else NEVER_S)
    await database.write(nothing)
    keeper = Keeper(database=database, metrics=Metrics(), key=None, copies=None)
    await keeper.verify()
    assert pages == ([4, 4, 1] if busy else [ROWS])
    assert keeper.walks["acme"].seq == ROWS


async def test_what_the_start_made_is_not_looked_through_for_garbage(tmp_path: Path) -> None:
    ledger = Ledger(LedgerSettings(data_dir=tmp_path))
    config = uvicorn.Config(make_app(ledger), host="127.0.0.1", port=0, log_config=None)
    server = LedgerServer(config, ledger)
    config.load()
    server.lifespan = config.lifespan_class(config)
    thresholds = gc.get_threshold()
    try:
        await server.startup()
        stays = gc.get_freeze_count()
        assert gc.get_threshold() == COLLECT_AFTER
        await server.shutdown()
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    assert stays > 10_000
