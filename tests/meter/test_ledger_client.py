"""What the meter sends with a batch, and how it reads an answer that it was torn on its way."""

import msgspec
import pytest
from aiohttp import web

from gristmill_contracts.body_crc import CRC_HEADER, crc_of
from gristmill_contracts.http import Problem, ProducerCursor
from gristmill_meter.ledger_client import LedgerClient
from gristmill_meter.ports import LedgerAwayError
from gristmill_testing.ledger import make_batch, make_event


async def test_a_torn_batch_is_sent_again_as_it_was() -> None:
    arrived: list[bytes] = []

    async def receive(request: web.Request) -> web.Response:
        body = await request.read()
        assert request.headers[CRC_HEADER] == crc_of(body)
        arrived.append(body)
        if len(arrived) == 1:
            torn = Problem(code="torn", message="not what was summed up", retryable=True)
            return web.Response(body=msgspec.msgpack.encode(torn), status=400)
        cursor = ProducerCursor(producer="s-1", acked_seq=2)
        return web.Response(body=msgspec.msgpack.encode(cursor))

    app = web.Application()
    app.router.add_post("/v1/usage/batches", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = LedgerClient(f"http://127.0.0.1:{port}")
    client.open()
    batch = make_batch("s-1", [make_event(1), make_event(2)])
    try:
        # The poster sends it again for as long as the ledger is away.
        with pytest.raises(LedgerAwayError, match="not what was summed up"):
            await client.post_batch(batch, 1)
        assert (await client.post_batch(batch, 1)).acked_seq == 2
    finally:
        await client.close()
        await runner.cleanup()
    assert arrived == [msgspec.msgpack.encode(batch)] * 2
