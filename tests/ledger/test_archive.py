"""The archive: how operations ended is told while no meter serves them, until their retention is over."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.errors import (
    FencedError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.http import Problem
from gristmill_contracts.inbox import ArchiveOperations
from gristmill_contracts.units import now_us
from gristmill_contracts.usage import Counts
from gristmill_ledger.bodies import store_body
from gristmill_ledger.sweeper import Sweeper
from gristmill_testing.inbox_calls import InboxCalls, archived
from gristmill_testing.ledger import running_ledger
from gristmill_testing.meter_world import forward_backward


@pytest.fixture
async def calls(migrated_url: str, tmp_path: Path) -> AsyncIterator[InboxCalls]:
    async with running_ledger(
        tmp_path / "data", database_url=migrated_url, artifacts_dir=tmp_path / "store"
    ) as client:
        made = InboxCalls(client=client)
        await made.register()
        await made.claim()
        await made.beat(state="Draining")
        yield made


def bodies(tmp_path: Path) -> int:
    found = (tmp_path / "store" / ".bodies").rglob("*")
    return sum(path.is_file() and ".sha256" not in path.parts for path in found)


async def sweep(calls: InboxCalls) -> bool:
    ledger = calls.client.ledger
    return await Sweeper(database=ledger.database, bodies=ledger.bodies).step()


async def test_what_ended_is_told_as_its_meter_told_it(calls: InboxCalls, tmp_path: Path) -> None:
    failed = archived(3, state="Failed")
    failed.error = Problem(code="out_of_memory", message="too large")
    await calls.archive(archived(1), archived(2, size=100_000), failed, archived(5, stream="log"))
    view = await calls.poll("train", 1)
    assert (view.state, view.counts) == ("Completed", Counts(train=1))
    assert view.result == ops.OptimStepResult(metrics={"step": 1.0})
    large = (await calls.poll("train", 2)).result
    assert isinstance(large, ops.ForwardResult)
    assert large.outputs[0]["logprobs"].size == 25_000
    assert bodies(tmp_path) == 1
    assert (await calls.poll("train", 3)).error == failed.error
    assert (await calls.poll("log", 5)).state == "Completed"
    with pytest.raises(NotFoundError):
        await calls.poll("train", 5)


async def test_archiving_again_changes_nothing(calls: InboxCalls, tmp_path: Path) -> None:
    for _ in range(2):
        await calls.archive(archived(1, size=100_000), archived(2))
    later = archived(2, state="Skipped")
    await calls.archive(later)
    assert (await calls.poll("train", 2)).state == "Completed"
    assert bodies(tmp_path) == 1


async def test_the_archive_says_more_than_the_inbox(calls: InboxCalls) -> None:
    await calls.submit(1)
    (entry,) = (await calls.claim()).entries
    await calls.ack(entry.position)
    assert (await calls.poll("train", 1)).state == "InProgress"
    await calls.archive(archived(1))
    assert (await calls.poll("train", 1)).state == "Completed"


async def test_a_result_goes_when_its_retention_is_over(calls: InboxCalls, tmp_path: Path) -> None:
    old_us = now_us() - 3_600_000_000
    await calls.archive(
        archived(1, ended_us=old_us + 1_500_000, size=100_000),
        archived(2, ended_us=old_us - 1),
        archived(3),
    )
    with pytest.raises(NotFoundError):
        await calls.poll("train", 2)
    assert (await calls.poll("train", 1)).state == "Completed"
    while True:
        await sweep(calls)
        try:
            await calls.poll("train", 1)
        except NotFoundError:
            break
    await sweep(calls)
    assert bodies(tmp_path) == 0
    assert (await calls.poll("train", 3)).state == "Completed"


async def test_what_the_inbox_knew_goes_with_the_results(
    calls: InboxCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    await calls.submit(1)
    await calls.submit(2)
    (first, _) = (await calls.claim()).entries
    await calls.ack(first.position)
    await sweep(calls)
    assert (await calls.poll("train", 1)).state == "InProgress"
    monkeypatch.setattr(limits, "RESULT_RETENTION_S", 0.0)
    await sweep(calls)
    with pytest.raises(NotFoundError):
        await calls.poll("train", 1)
    assert (await calls.poll("train", 2)).state == "Pending", "what waits is never forgotten"


async def test_the_archive_of_a_session_is_bounded_and_keeps_what_came_first(
    calls: InboxCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ARCHIVE_OPERATIONS_MAX", 2)
    await calls.archive(archived(9), archived(8), archived(7))
    await calls.archive(archived(6))
    assert (await calls.poll("train", 8)).state == "Completed"
    for number in (7, 6):
        with pytest.raises(NotFoundError):
            await calls.poll("train", number)
    monkeypatch.setattr(limits, "ARCHIVE_OPERATIONS_MAX", 100)
    monkeypatch.setattr(limits, "ARCHIVE_BYTES_MAX", 50_000)
    await calls.archive(archived(5, size=100_000))
    with pytest.raises(NotFoundError):
        await calls.poll("train", 5)


async def test_only_the_newest_attempt_that_registered_archives(calls: InboxCalls) -> None:
    await calls.register(attempt=2)
    with pytest.raises(FencedError):
        await calls.archive(archived(1), attempt=1)
    with pytest.raises(UnavailableError):
        await calls.archive(archived(1), attempt=3)
    await calls.archive(archived(1), attempt=2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param({"retention_s": -1.0}, InvalidRequestError, id="negative retention"),
        pytest.param({"retention_s": 1e12}, InvalidRequestError, id="endless retention"),
        pytest.param({"retention_s": float("nan")}, InvalidRequestError, id="no retention"),
        pytest.param({"attempt": -1}, InvalidRequestError, id="attempt below 0"),
        pytest.param(
            {"operations": [archived(1, state="Pending")]}, InvalidRequestError, id="not ended"
        ),
        pytest.param({"operations": [archived(2**63)]}, InvalidRequestError, id="number 2^63"),
        pytest.param(
            {"operations": [archived(1, ended_us=-5)]}, InvalidRequestError, id="before 1970"
        ),
        pytest.param({"operations": [archived(1)] * 1001}, GristmillError, id="too many"),
    ],
)
async def test_bad_archives_are_refused_and_change_nothing(
    calls: InboxCalls, change: dict[str, object], error: type[GristmillError]
) -> None:
    message = ArchiveOperations(attempt=1, retention_s=60, operations=[archived(1)])
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(error):
        await calls.client.ask(object, "POST", "/v1/sessions/s-1/archive", message)
    with pytest.raises(NotFoundError):
        await calls.poll("train", 1)


@pytest.mark.parametrize("path", ["train/x", "other/1", "train/-1", "log/99999999999999999999"])
async def test_a_path_that_names_no_operation_is_refused(calls: InboxCalls, path: str) -> None:
    status, body = await calls.client.call("GET", f"/v1/sessions/s-1/archive/{path}")
    assert status == 400
    assert msgspec.msgpack.decode(body, type=Problem).code == "invalid_request"


async def test_a_session_that_nobody_registered_has_no_archive(calls: InboxCalls) -> None:
    stranger = InboxCalls(client=calls.client, uid="s-9")
    with pytest.raises(NotFoundError):
        await stranger.archive(archived(1))


async def test_a_body_that_no_row_names_is_removed_once_it_is_old(
    calls: InboxCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await calls.submit(1, forward_backward(9000))
    await calls.archive(archived(7, size=100_000))
    ledger = calls.client.ledger
    await store_body(ledger.bodies, "acme", "s-1", b"x" * 50_000)
    sweeper = Sweeper(database=ledger.database, bodies=ledger.bodies)
    assert await sweeper.remove_orphans() == 0, "an upload may still be on its way"
    monkeypatch.setattr(limits, "ORPHAN_AGE_S", 0.0)
    assert await sweeper.remove_orphans() == 1
    assert bodies(tmp_path) == 2
    assert (await calls.poll("train", 7)).result is not None
    assert len((await calls.claim()).entries) == 1


async def test_what_ended_at_the_end_of_time_is_kept_as_long_as_time_goes(
    calls: InboxCalls,
) -> None:
    """A clock that is far off is no reason to fail: nothing is added past 64 bits."""
    await calls.archive(archived(1, ended_us=2**63 - 1))
    assert (await calls.poll("train", 1)).state == "Completed"
