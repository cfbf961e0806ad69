"""The supervisor goes on where the volume of its data folder does not."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gristmill_cli.local.layout import Layout, make_folders
from gristmill_cli.local.ledger_client import LedgerClient
from gristmill_cli.local.ports import LOOPBACK, load_addresses
from gristmill_cli.local.supervisor import Supervisor
from gristmill_sessions.local import open_local_store


@asynccontextmanager
async def idle_supervisor(layout: Layout) -> AsyncIterator[Supervisor]:
    """One without sessions, and with a ledger address that nobody answers at."""
    url = f"http://{LOOPBACK}:9"
    async with aiohttp.ClientSession() as http:
        supervisor = Supervisor(
            layout=layout,
            store=open_local_store(layout.store),
            addresses=load_addresses(layout),
            ledger=LedgerClient(http, url),
            ledger_url=url,
            gateway_host=LOOPBACK,
            gateway_port=0,
        )
        yield supervisor


async def test_a_volume_that_takes_no_file_does_not_end_the_supervisor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = Layout(tmp_path)
    make_folders(layout)
    # A folder in its place fails the write as a full volume does, for root as well.
    layout.processes.mkdir()
    async with idle_supervisor(layout) as supervisor:
        supervisor.stop()
        await supervisor.run()
        assert "processes_not_shown" in [record.message for record in caplog.records]
        layout.processes.rmdir()
        await supervisor.run()
    shown = json.loads(layout.processes.read_bytes())
    assert {row["name"] for row in shown} == {"ledger", "gateway"}
