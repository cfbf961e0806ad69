"""A watched cache: what it holds after every kind of luck with the API server."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gristmill_contracts.errors import UnavailableError
from gristmill_contracts.tenant import Tenant, TenantStatus
from gristmill_gateway import kubernetes_watch
from gristmill_gateway.kubernetes_cache import Cache, Made
from gristmill_gateway.kubernetes_errors import GoneError
from gristmill_gateway.kubernetes_objects import read_object
from gristmill_gateway.kubernetes_watch import Reflector


def content(name: str, version: int, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)},
        "spec": spec,
    }


def tenant(name: str, version: int, **spec: Any) -> Tenant:
    return read_object(Tenant, content(name, version, **spec))


def event(kind: str, name: str, version: int, **spec: Any) -> dict[str, Any]:
    return {"type": kind, "object": content(name, version, **spec)}


class ScriptedApi:
    """Answers lists and watches in the order given; after the last watch it stays silent."""

    def __init__(self, lists: list[Any], watches: list[list[Any]]) -> None:
        self.lists = lists
        self.watches = watches
        self.asked: list[dict[str, str]] = []
        self.silent = asyncio.Event()

    async def get(self, _path: str, query: dict[str, str]) -> dict[str, Any]:
        self.asked.append(query)
        answer = self.lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    async def watch(
        self, _path: str, query: dict[str, str], opened: Callable[[], None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        self.asked.append(query)
        events = self.watches.pop(0) if self.watches else None
        if events and isinstance(events[0], Exception):
            raise events[0]
        opened()
        for each in events or ():
            if isinstance(each, Exception):
                raise each
            yield each
        if events is None:
            self.silent.set()
            await asyncio.Event().wait()


def listed(version: int, *items: dict[str, Any], more: str = "") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version), "continue": more}, "items": list(items)}


@asynccontextmanager
async def following(
    api: ScriptedApi,
) -> AsyncGenerator[tuple[Cache[Tenant], Reflector[Tenant]], None]:
    """A cache that has taken in all that the script holds."""
    cache: Cache[Tenant] = Cache(lambda: None)
    reflector = Reflector(api, Tenant, cache)  # type: ignore[arg-type]
    task = asyncio.create_task(reflector.run())
    async with asyncio.timeout(10):
        await api.silent.wait()
    try:
        yield cache, reflector
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "BACKOFF_S_MIN", 0.001)
    monkeypatch.setattr("gristmill_contracts.limits.WATCH_BACKOFF_S_MAX", 0.002)


def names(cache: Cache[Tenant]) -> list[str]:
    return [each.metadata.name for each in cache.list()]


async def test_a_list_of_several_pages_and_a_watch_that_goes_on_from_it() -> None:
    api = ScriptedApi(
        [listed(5, content("a", 1), more="x"), listed(5, content("b", 2))],
        [
            [
                event("ADDED", "c", 6),
                event("MODIFIED", "a", 7, displayName="A"),
                event("DELETED", "b", 8),
            ]
        ],
    )
    async with following(api) as (cache, _):
        assert names(cache) == ["a", "c"]
        found = cache.get("", "a")
        assert found is not None
        assert found.spec.display_name == "A"
    assert api.asked[1]["continue"] == "x"
    assert api.asked[2]["resourceVersion"] == "5"
    assert api.asked[3]["resourceVersion"] == "8"


@pytest.mark.parametrize("broken", [["no mapping"], [AttributeError("a bug of ours")]])
async def test_a_bug_in_reading_a_change_starts_over_with_a_list(broken: list[Any]) -> None:
    api = ScriptedApi([listed(5, content("a", 1)), listed(9, content("b", 8))], [broken])
    async with following(api) as (cache, reflector):
        assert names(cache) == ["b"]
        assert not reflector.away
    assert [each["resourceVersion"] for each in api.asked if "watch" in each] == ["5", "9"]


async def test_a_bookmark_moves_where_the_next_watch_begins() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "90"}}}
    api = ScriptedApi([listed(5)], [[bookmark]])
    async with following(api):
        pass
    assert api.asked[-1]["resourceVersion"] == "90"


@pytest.mark.parametrize(
    "watch", [[GoneError("too old")], [event("ADDED", "x", 6), GoneError("too old")]]
)
async def test_a_version_that_is_gone_lists_again_and_forgets_what_is_not_there(
    watch: list[Any],
) -> None:
    api = ScriptedApi([listed(5, content("a", 1)), listed(20, content("b", 9))], [watch])
    async with following(api) as (cache, _):
        assert names(cache) == ["b"]
    assert api.asked[-1]["resourceVersion"] == "20"


async def test_a_lost_watch_goes_on_where_it_was_and_the_cache_stays() -> None:
    api = ScriptedApi(
        [listed(5, content("a", 1))],
        [
            [event("ADDED", "b", 6), UnavailableError("lost")],
            [UnavailableError("refused")],
            [event("ADDED", "c", 7)],
        ],
    )
    async with following(api) as (cache, _):
        assert names(cache) == ["a", "b", "c"]
    assert [each.get("resourceVersion") for each in api.asked[1:]] == ["5", "6", "6", "7"]


async def test_a_first_list_that_fails_is_tried_again_and_nothing_is_told_meanwhile() -> None:
    api = ScriptedApi(
        [UnavailableError("down"), UnavailableError("down"), listed(5, content("a", 1))], []
    )
    async with following(api) as (cache, reflector):
        assert cache.filled
        assert not reflector.away
        assert names(cache) == ["a"]


async def test_an_object_of_another_shape_is_left_out_and_the_rest_is_there() -> None:
    broken = content("b", 2) | {"spec": {"keys": "none"}}
    api = ScriptedApi(
        [listed(5, content("a", 1), broken)],
        [[{"type": "ADDED", "object": broken}, event("ADDED", "c", 7)]],
    )
    async with following(api) as (cache, _):
        assert names(cache) == ["a", "c"]


def test_a_write_is_seen_at_once_and_an_older_word_of_the_watch_does_not_undo_it() -> None:
    cache: Cache[Tenant] = Cache(lambda: None)
    cache.replace([tenant("a", 5)], 5)
    cache.written(tenant("a", 9, displayName="new"))
    cache.told(tenant("a", 7, displayName="old"))
    found = cache.get("", "a")
    assert found is not None
    assert found.spec.display_name == "new"


def test_the_answer_to_a_write_that_comes_late_brings_nothing_back() -> None:
    cache: Cache[Tenant] = Cache(lambda: None)
    cache.replace([], 5)
    cache.told(tenant("a", 6))
    cache.gone(("", "a"), "uid-a", 7)
    cache.written(tenant("a", 6))
    assert names(cache) == []


def test_a_deletion_of_a_namesake_that_came_before_removes_nothing() -> None:
    cache: Cache[Tenant] = Cache(lambda: None)
    cache.told(tenant("a", 9))
    cache.gone(("", "a"), "another-uid", 10)
    assert names(cache) == ["a"]


def test_a_list_does_not_forget_what_was_written_after_it_was_made() -> None:
    cache: Cache[Tenant] = Cache(lambda: None)
    cache.replace([tenant("a", 3)], 5)
    cache.written(tenant("b", 9))
    cache.replace([tenant("a", 3)], 7)
    assert names(cache) == ["a", "b"]
    cache.replace([tenant("a", 3)], 12)
    assert names(cache) == ["a"]


def test_what_follows_from_objects_is_made_again_when_they_change_and_not_before() -> None:
    cache: Cache[Tenant] = Cache(lambda: None)
    made: list[int] = []

    def count(tenants: list[Tenant]) -> int:
        made.append(len(tenants))
        return len(tenants)

    plain = Made(cache, count, of_status=False)
    cache.replace([tenant("a", 1)], 5)
    assert [plain.get(), plain.get()] == [1, 1]
    told = tenant("a", 6)
    cache.told(told.model_copy(update={"status": TenantStatus(account_id="1")}))
    assert plain.get() == 1
    assert made == [1]
    named = tenant("a", 7)
    meta = named.metadata.model_copy(update={"annotations": {"a": "1"}})
    cache.told(named.model_copy(update={"metadata": meta}))
    cache.told(tenant("b", 8))
    assert plain.get() == 2
    cache.gone(("", "b"), "uid-b", 9)
    assert plain.get() == 1
    assert made == [1, 2, 1]
    of_status = Made(cache, count, of_status=True)
    assert of_status.get() == 1
    cache.told(tenant("a", 10).model_copy(update={"status": TenantStatus(account_id="2")}))
    assert of_status.get() == 1
    assert made == [1, 2, 1, 1, 1]
