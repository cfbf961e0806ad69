"""Heartbeats: the newest of each session, a cursor that only grows, polls that are held."""

import asyncio
from pathlib import Path

from gristmill_contracts.http import Empty, Heartbeat, HeartbeatPage
from gristmill_testing.ledger import START_US, LedgerClient, make_heartbeat, running_ledger


async def beat(client: LedgerClient, *heartbeats: Heartbeat) -> None:
    await client.ask(Empty, "POST", "/v1/heartbeats", list(heartbeats))


async def poll(client: LedgerClient, after: int = 0, wait_s: float = 0) -> HeartbeatPage:
    return await client.ask(HeartbeatPage, "GET", "/v1/heartbeats", after=after, wait_s=str(wait_s))


def uids(page: HeartbeatPage) -> list[str]:
    return [heartbeat.view.uid for heartbeat in page.heartbeats]


async def test_a_page_holds_the_newest_heartbeat_of_each_session(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a", at_us=1), make_heartbeat("b", at_us=1))
        await beat(client, make_heartbeat("a", at_us=2))
        page = await poll(client)
        assert [(h.view.uid, h.at_us) for h in page.heartbeats] == [("b", 1), ("a", 2)]
        assert (await poll(client, after=page.cursor)).heartbeats == []


async def test_only_sessions_that_changed_are_behind_the_cursor(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a"), make_heartbeat("b"))
        cursor = (await poll(client)).cursor
        await beat(client, make_heartbeat("b", at_us=9))
        page = await poll(client, after=cursor)
        assert uids(page) == ["b"]
        assert page.cursor > cursor


async def test_a_heartbeat_of_an_older_attempt_is_not_kept(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a", attempt=2))
        cursor = (await poll(client)).cursor
        await beat(client, make_heartbeat("a", attempt=1, at_us=START_US + 99))
        assert (await poll(client, after=cursor)).heartbeats == []
        await beat(client, make_heartbeat("a", attempt=3), make_heartbeat("a", attempt=2))
        assert [h.view.attempt for h in (await poll(client, after=cursor)).heartbeats] == [3]


async def test_a_meter_whose_clock_was_set_back_is_still_heard(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a", at_us=START_US))
        cursor = (await poll(client)).cursor
        await beat(client, make_heartbeat("a", at_us=START_US - 10**9))
        assert uids(await poll(client, after=cursor)) == ["a"]


async def test_a_held_poll_is_answered_by_the_next_heartbeat(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        polls = [asyncio.create_task(poll(client, wait_s=30)) for _ in range(5)]
        while client.ledger.polls_held < len(polls):
            await asyncio.sleep(0)
        await beat(client, make_heartbeat("a"))
        async with asyncio.timeout(10):
            pages = await asyncio.gather(*polls)
        assert [uids(page) for page in pages] == [["a"]] * 5


async def test_a_held_poll_ends_empty_when_its_time_is_over(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a"))
        cursor = (await poll(client)).cursor
        page = await poll(client, after=cursor, wait_s=0.05)
        assert (page.heartbeats, page.cursor) == ([], cursor)


async def test_a_held_poll_does_not_delay_the_end_of_the_ledger(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        held = asyncio.create_task(poll(client, wait_s=30))
        while not client.ledger.polls_held:
            await asyncio.sleep(0)
        await client.ledger.wake()
        async with asyncio.timeout(10):
            assert (await held).heartbeats == []


async def test_the_cursor_grows_across_a_restart(migrated_url: str, tmp_path: Path) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a"), make_heartbeat("b"))
        before = await poll(client)
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        assert await poll(client) == before
        await beat(client, make_heartbeat("c"))
        page = await poll(client, after=before.cursor)
        assert (uids(page), page.cursor > before.cursor) == (["c"], True)


async def test_a_cursor_of_a_ledger_that_was_restored_begins_again(
    migrated_url: str, tmp_path: Path
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await beat(client, make_heartbeat("a"))
        assert uids(await poll(client, after=10_000)) == ["a"]
