"""The proxy that faults are injected with does what its tests rely on."""

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gristmill_testing.api_proxy import ApiProxy, api_proxy


class Upstream:
    """Counts writes; a watch sends five events."""

    def __init__(self) -> None:
        self.writes = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            answer = web.StreamResponse()
            await answer.prepare(request)
            for number in range(5):
                await answer.write(json.dumps({"type": "ADDED", "object": number}).encode() + b"\n")
            return answer
        self.writes += request.method == "POST"
        return web.json_response(
            {"writes": self.writes, "key": request.headers.get("Authorization")}
        )


@pytest.fixture
async def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
async def proxy(upstream: Upstream) -> AsyncIterator[ApiProxy]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    async with TestServer(app) as server:
        with api_proxy(str(server.make_url("")), tls=False) as running:
            yield running


async def watched(proxy: ApiProxy) -> list[object]:
    async with aiohttp.ClientSession() as client, client.get(f"{proxy.url}/w?watch=true") as answer:
        return [json.loads(line)["object"] async for line in answer.content]


async def post(proxy: ApiProxy, timeout_s: float = 5) -> int:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as client,
        client.post(f"{proxy.url}/things", headers={"Authorization": "Bearer x"}) as answer,
    ):
        assert answer.status != 200 or (await answer.json())["key"] == "Bearer x"
        return answer.status


async def test_a_refusal_does_nothing_and_a_lost_answer_did_it(
    proxy: ApiProxy, upstream: Upstream
) -> None:
    assert await post(proxy) == 200
    proxy.inject("refuse", "POST /things", status=429, retry_after_s=1)
    assert await post(proxy) == 429
    assert upstream.writes == 1
    proxy.inject("lose", "POST /things")
    with pytest.raises(aiohttp.ClientError):
        await post(proxy)
    assert upstream.writes == 2
    proxy.inject("hang", "POST /things", seconds=0.2)
    with pytest.raises(aiohttp.ClientError):
        await post(proxy)
    assert upstream.writes == 2
    assert await post(proxy) == 200
    assert [each.status for each in proxy.requests("POST")] == [200, 429, 0, 0, 200]


async def test_reads_can_be_stale(proxy: ApiProxy) -> None:
    async def read() -> int:
        async with aiohttp.ClientSession() as client, client.get(f"{proxy.url}/things") as answer:
            writes: int = (await answer.json())["writes"]
            return writes

    proxy.inject("stale", "GET /things", times=2)
    assert await read() == 0
    await post(proxy)
    assert await read() == 0
    assert await read() == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("watch-drop", [1, 2, 3, 4]),
        ("watch-reorder", [1, 0, 2, 3, 4]),
        ("watch-repeat", [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]),
        ("watch-silence", []),
    ],
)
async def test_watches_can_be_distorted(proxy: ApiProxy, kind: str, expected: list[int]) -> None:
    proxy.inject(kind, "watch=true")  # type: ignore[arg-type]
    assert await watched(proxy) == expected
    assert await watched(proxy) == [0, 1, 2, 3, 4]


async def test_a_watch_can_expire_or_break(proxy: ApiProxy) -> None:
    proxy.inject("watch-gone", "watch=true")
    gone = await watched(proxy)
    assert [each["code"] for each in gone if isinstance(each, dict)] == [410]
    proxy.inject("watch-cut", "watch=true")
    with pytest.raises(aiohttp.ClientError):
        await watched(proxy)
