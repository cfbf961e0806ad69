"""The store over custom resources, where the API server is slow."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gristmill_contracts import limits
from gristmill_contracts.errors import NotFoundError, OverloadedError
from gristmill_gateway.kubernetes import KubernetesStore


class HungApi:
    """Takes calls and answers none of them, until it is let go: then there is nothing."""

    def __init__(self) -> None:
        self.calls = 0
        self.go_on = asyncio.Event()

    async def get(self, path: str, _query: dict[str, str] | None = None) -> dict[str, Any]:
        self.calls += 1
        await self.go_on.wait()
        raise NotFoundError(f"there is no {path}")


async def test_a_hung_api_server_holds_so_many_threads_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work on sessions that run needs threads, too."""
    monkeypatch.setattr(limits, "API_PLACE_WAIT_S", 0.05)
    loop, most = asyncio.get_running_loop(), limits.API_CONNECTIONS_MAX
    loop.set_default_executor(ThreadPoolExecutor(2 * most))
    api = HungApi()
    store = KubernetesStore(api, b"k" * 32)  # type: ignore[arg-type]
    waiting = [
        asyncio.create_task(asyncio.to_thread(store.read_session, "gm-acme", f"s{number}"))
        for number in range(most)
    ]
    async with asyncio.timeout(10):
        while api.calls < most:
            await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="try again"):
            await asyncio.to_thread(store.read_session, "gm-acme", "one-more")
        assert await asyncio.to_thread(lambda: "a thread is left") == "a thread is left"
        api.go_on.set()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(each) for each in ends} == {NotFoundError}
        with pytest.raises(NotFoundError):
            await asyncio.to_thread(store.read_session, "gm-acme", "again")
