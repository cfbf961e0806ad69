"""The inbox: what is accepted while no meter serves is taken once, in order, by the newest attempt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts.admission import SequenceConflictError
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServedError,
    UnavailableError,
)
from gristmill_contracts.http import Problem, Refuse, RegisterSession, Submit
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.inbox import AckInbox, InboxSkip, PostInbox
from gristmill_ledger import inbox, inbox_rules
from gristmill_ledger.inbox_rules import Holder, is_served
from gristmill_testing.inbox_calls import InboxCalls
from gristmill_testing.ledger import START_US, running_ledger
from gristmill_testing.meter_world import forward_backward, make_submit, optim_step, sample

KEY = bytes(range(32))
LARGE = forward_backward(8192)
"""Its payload does not fit into a row."""


@pytest.fixture
async def calls(migrated_url: str, tmp_path: Path) -> AsyncIterator[InboxCalls]:
    async with running_ledger(
        tmp_path / "data", database_url=migrated_url, artifacts_dir=tmp_path / "store"
    ) as client:
        yield InboxCalls(client=client)


def stored_bodies(tmp_path: Path) -> list[str]:
    bodies = (tmp_path / "store" / ".bodies").rglob("*")
    return [path.name for path in bodies if path.is_file() and ".sha256" not in path.parts]


async def taken(calls: InboxCalls, attempt: int = 1) -> list[tuple[str, int]]:
    """Claim and acknowledge everything, as a meter that starts."""
    found: list[tuple[str, int]] = []
    while not (page := await calls.claim(attempt)).served:
        found += [(entry.stream, entry.number) for entry in page.entries]
        await calls.ack(*(entry.position for entry in page.entries), attempt=attempt)
    return found


async def test_what_waits_is_claimed_in_the_order_in_which_it_was_accepted(
    calls: InboxCalls, tmp_path: Path
) -> None:
    await calls.submit(2)
    first = await calls.submit(None, sample())
    await calls.submit(1, LARGE)
    await calls.refuse(3, breaks=True)
    second = await calls.submit(None, sample())
    assert second.number > first.number >= limits.INBOX_LOG_NUMBER_MIN
    assert len(stored_bodies(tmp_path)) == 1
    await calls.register()
    page = await calls.claim()
    assert [(e.stream, e.number, e.kind) for e in page.entries] == [
        ("train", 2, "submit"), ("log", first.number, "submit"), ("train", 1, "submit"),
        ("train", 3, "refuse"), ("log", second.number, "submit"),
    ]  # fmt: skip
    assert not page.served
    large = msgspec.msgpack.decode(page.entries[2].body, type=Submit)
    assert large == make_submit(1, LARGE)
    assert msgspec.msgpack.decode(page.entries[3].body, type=Refuse).breaks_accumulation
    assert await calls.claim() == page, "a claim changes nothing"
    assert (await calls.claim(after=page.entries[3].position)).entries == page.entries[4:]
    await calls.ack(*(entry.position for entry in page.entries))
    assert stored_bodies(tmp_path) == []
    assert await calls.claim() == await calls.claim()
    assert (await calls.claim()).served


async def test_a_session_that_serves_takes_its_operations_itself(calls: InboxCalls) -> None:
    await calls.register()
    assert (await calls.claim()).served
    await calls.beat()
    with pytest.raises(ServedError):
        await calls.submit(1)
    assert (await calls.view()).served_by == 1


async def test_a_meter_that_goes_down_opens_the_inbox_at_once(calls: InboxCalls) -> None:
    await calls.register()
    await calls.claim()
    await calls.beat(state="Draining", received=4)
    assert (await calls.submit(5)).state == "Pending"
    assert (await calls.view()).served_by is None


async def test_a_newer_attempt_opens_the_inbox_until_it_has_emptied_it(calls: InboxCalls) -> None:
    await calls.register()
    await calls.claim()
    await calls.beat()
    await calls.register(attempt=2)
    await calls.submit(1)
    assert await taken(calls, attempt=2) == [("train", 1)]
    with pytest.raises(ServedError):
        await calls.submit(2)


async def test_a_live_meter_is_told_that_something_waits(calls: InboxCalls) -> None:
    await calls.register()
    await calls.claim()
    assert (await calls.beat()).inbox == []
    await calls.beat(state="Draining")
    await calls.submit(1)
    assert (await calls.beat()).inbox == ["s-1"]
    assert await taken(calls) == [("train", 1)]
    assert (await calls.beat()).inbox == []


async def test_a_meter_that_never_asks_for_an_inbox_is_waited_for(calls: InboxCalls) -> None:
    """It is of the release before: what is put there would wait for ever."""
    await calls.submit(1)
    await calls.register()
    with pytest.raises(UnavailableError, match="takes nothing from an inbox"):
        await calls.submit(2)
    assert (await calls.submit(1)).duplicate
    await calls.claim()
    await calls.submit(2)


@pytest.mark.parametrize(
    ("holder", "served"),
    [
        pytest.param(Holder(), False, id="nobody"),
        pytest.param(Holder(served_by=1, owner=1, served_us=99_000_000), True, id="a moment ago"),
        pytest.param(Holder(served_by=1, owner=1, served_us=90_000_000), False, id="silent"),
        pytest.param(
            Holder(
                served_by=1, owner=1, granted_attempt=1, granted_until_us=128_000_000
            ), True, id="beats",
        ),
        pytest.param(
            Holder(
                served_by=2, owner=2, granted_attempt=1, granted_until_us=128_000_000
            ), False, id="another's beats",
        ),
        pytest.param(Holder(served_by=1, owner=2, served_us=99_999_999), False, id="replaced"),
    ],
)  # fmt: skip
def test_a_session_is_served_while_its_meter_is_heard(holder: Holder, served: bool) -> None:
    assert is_served(holder, 100_000_000) is served


async def test_the_same_operation_again_is_the_same_operation(calls: InboxCalls) -> None:
    first = await calls.submit(1, LARGE, token="t-1")
    for number, token in ((1, "t-1"), (1, None), (1, "t-2")):
        again = await calls.submit(number, LARGE, token=token)
        assert (again.number, again.duplicate) == (first.number, True)
    keyless = await calls.submit(None, sample(), token="t-3")
    assert await calls.submit(None, sample(), token="t-3") == msgspec.structs.replace(
        keyless, duplicate=True
    )
    assert (await calls.view()).waiting == 2
    await calls.register()
    await taken(calls)
    again = await calls.submit(1, LARGE, token="t-1")
    assert (again.number, again.duplicate, again.state) == (1, True, "InProgress")
    assert (await calls.view()).waiting == 0


async def test_another_request_under_a_number_is_a_conflict_that_names_the_last(
    calls: InboxCalls,
) -> None:
    await calls.submit(1)
    await calls.submit(2, token="t")
    with pytest.raises(ConflictError, match="last received number is 2, continue with 3"):
        await calls.submit(1, LARGE)
    with pytest.raises(InvalidRequestError, match="clientToken 't'"):
        await calls.submit(3, LARGE, token="t")
    with pytest.raises(ConflictError, match="last received number is 2"):
        await calls.refuse(2)
    with pytest.raises(ConflictError, match="more than 1024 above 3"):
        await calls.submit(4 + limits.SEQUENCE_AHEAD_MAX)
    view = await calls.view()
    assert (view.waiting, view.last_received_number) == (2, 2)


async def test_a_refused_number_may_be_taken_again_until_something_behind_it_ran(
    calls: InboxCalls,
) -> None:
    await calls.refuse(1)
    assert (await calls.refuse(1)).duplicate
    await calls.submit(2)
    assert not (await calls.submit(1)).duplicate
    await calls.refuse(3)
    await calls.submit(4)
    await calls.register()
    assert [number for _, number in await taken(calls)] == [1, 2, 1, 3, 4]
    with pytest.raises(ConflictError, match="number 3"):
        await calls.submit(3)


async def test_only_the_log_knows_what_the_meter_had_received(calls: InboxCalls) -> None:
    await calls.beat(state="Draining", received=7)
    with pytest.raises(UnavailableError, match="operation 7 is in the log"):
        await calls.submit(7)
    await calls.submit(8)
    view = await calls.view()
    assert (view.last_received_number, view.waiting) == (8, 1)


async def test_an_inbox_is_bounded_in_operations(
    calls: InboxCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INBOX_OPERATIONS_MAX", 3)
    for number in (1, 2, 3):
        await calls.submit(number)
    with pytest.raises(OverloadedError, match="3 operations wait"):
        await calls.submit(4)
    status, body = await calls.client.call(
        "POST", "/v1/sessions/s-1/inbox",
        PostInbox(tenant=TenantName("acme"), submit=make_submit(4, optim_step())),
    )  # fmt: skip
    assert (status, msgspec.msgpack.decode(body, type=Problem).retryable) == (429, True)
    assert (await calls.submit(3)).duplicate, "a retry is answered all the same"
    await calls.register()
    await taken(calls)
    await calls.beat(state="Draining", received=3)
    await calls.submit(4)


async def test_an_inbox_is_bounded_in_bytes_and_keeps_nothing_that_it_refuses(
    calls: InboxCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INBOX_BYTES_MAX", 200_000)
    await calls.submit(1, LARGE)
    with pytest.raises(OverloadedError, match="bytes"):
        await calls.submit(2, LARGE)
    assert len(stored_bodies(tmp_path)) == 1
    assert (await calls.view()).waiting == 1


async def test_a_claim_comes_in_pages(calls: InboxCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INBOX_PAGE_OPERATIONS_MAX", 2)
    for number in (1, 2, 3):
        await calls.submit(number)
    await calls.register()
    assert [e.number for e in (await calls.claim()).entries] == [1, 2]
    monkeypatch.setattr(limits, "INBOX_PAGE_BYTES_MAX", 1)
    assert [e.number for e in (await calls.claim()).entries] == [1]
    assert [number for _, number in await taken(calls)] == [1, 2, 3]


async def test_only_the_newest_attempt_that_registered_takes_what_waits(calls: InboxCalls) -> None:
    await calls.submit(1)
    with pytest.raises(UnavailableError, match="not registered"):
        await calls.claim()
    await calls.register(attempt=1)
    (entry,) = (await calls.claim(attempt=1)).entries
    await calls.register(attempt=2)
    with pytest.raises(FencedError):
        await calls.claim(attempt=1)
    with pytest.raises(FencedError):
        await calls.ack(entry.position, attempt=1)
    with pytest.raises(UnavailableError):
        await calls.claim(attempt=3)
    assert await taken(calls, attempt=2) == [("train", 1)]


async def test_what_a_log_cannot_take_is_skipped_with_its_reason(calls: InboxCalls) -> None:
    await calls.submit(1)
    await calls.submit(2)
    await calls.register()
    one, two = (await calls.claim()).entries
    await calls.ack(one.position, skipped=[InboxSkip(position=two.position, reason="it failed")])
    await calls.ack(one.position, two.position)
    assert (await calls.poll("train", 1)).state == "InProgress"
    skipped = await calls.poll("train", 2)
    assert skipped.state == "Skipped"
    assert skipped.error == Problem(code="conflict", message="it failed")


async def test_a_poll_tells_how_far_an_operation_is(calls: InboxCalls) -> None:
    await calls.submit(1)
    await calls.refuse(2)
    keyless = await calls.submit(None, sample())
    assert (await calls.poll("train", 1)).state == "Pending"
    assert (await calls.poll("train", 2)).state == "Refused"
    assert (await calls.poll("log", keyless.number)).state == "Pending"
    with pytest.raises(NotFoundError):
        await calls.poll("train", 3)


async def test_what_waits_when_a_session_ends_is_skipped_and_nothing_comes_behind_it(
    calls: InboxCalls, tmp_path: Path
) -> None:
    await calls.submit(1, LARGE)
    await calls.close("the session was stopped")
    await calls.close("again")
    assert (await calls.poll("train", 1)).state == "Skipped"
    assert stored_bodies(tmp_path) == []
    with pytest.raises(ConflictError, match="over"):
        await calls.submit(2)
    assert (await calls.submit(1, LARGE)).duplicate
    await calls.register()
    assert (await calls.claim()).entries == []
    assert (await calls.view()).closed


async def test_submits_that_come_at_once_are_taken_once_each(calls: InboxCalls) -> None:
    again = [calls.submit(number, LARGE) for number in (1, 2, 3, 4)] * 1
    again += [calls.submit(number, LARGE) for number in (1, 2, 3, 4)]
    answers = await asyncio.gather(*again)
    assert sorted(answer.duplicate for answer in answers) == [False] * 4 + [True] * 4
    keyless = await asyncio.gather(*(calls.submit(None, sample()) for _ in range(8)))
    assert len({answer.number for answer in keyless}) == 8
    await calls.register()
    assert len(await taken(calls)) == 12


@pytest.mark.parametrize(
    ("message", "code"),
    [
        pytest.param(PostInbox(tenant=TenantName("acme")), "invalid_request", id="nothing"),
        pytest.param(
            PostInbox(tenant=TenantName("acme"), submit=make_submit(0, optim_step())),
            "invalid_request", id="number 0",
        ),
        pytest.param(
            PostInbox(tenant=TenantName("acme"), submit=make_submit(-1, optim_step())),
            "invalid_request", id="number below 0",
        ),
        pytest.param(
            PostInbox(tenant=TenantName("acme"), submit=make_submit(None, optim_step())),
            "invalid_request", id="train without a number",
        ),
        pytest.param(
            PostInbox(tenant=TenantName("acme"), submit=make_submit(1, sample())),
            "invalid_request", id="a sample in the wrong stream",
        ),
        pytest.param(
            PostInbox(
                tenant=TenantName("acme"), submit=make_submit(1, optim_step(), body_hash=b"x")
            ), "invalid_request", id="no hash",
        ),
        pytest.param(
            PostInbox(tenant=TenantName("A/b"), submit=make_submit(1, optim_step())),
            "invalid_request", id="no tenant",
        ),
        pytest.param(
            PostInbox(tenant=TenantName("other"), submit=make_submit(1, optim_step())),
            "conflict", id="another tenant's session",
        ),
        pytest.param(
            PostInbox(
                tenant=TenantName("acme"), submit=make_submit(1, optim_step(), token="a\0b")
            ), "invalid_request", id="a token with NUL",
        ),
        pytest.param(b"\xc1", "invalid_request", id="no msgpack"),
        pytest.param(b"\x80", "invalid_request", id="an empty message"),
    ],
)  # fmt: skip
async def test_bad_submits_are_refused_and_change_nothing(
    calls: InboxCalls, message: object, code: str
) -> None:
    await calls.client.ask(
        object, "POST", "/v1/sessions",
        RegisterSession(
            uid=SessionUid("s-1"), tenant=TenantName("acme"), project="", name="run", model="m",
            rank=8, created_us=START_US,
        ),
    )  # fmt: skip
    status, body = await calls.client.call("POST", "/v1/sessions/s-1/inbox", message)
    assert msgspec.msgpack.decode(body, type=Problem).code == code
    assert status in (400, 409)
    assert (await calls.view()).waiting == 0


async def test_a_body_that_is_too_large_is_refused(
    calls: InboxCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill_ledger.routes.inbox.BODY_BYTES_MAX", 1000)
    with pytest.raises(GristmillError, match="over 1000 bytes") as caught:
        await calls.submit(1, LARGE)
    assert not isinstance(caught.value, OverloadedError)


async def test_a_meter_reaches_its_own_inbox_alone(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    async with running_ledger(tmp_path / "data", cluster_key_file=tmp_path / "key") as client:
        gateway = InboxCalls(client=client.as_service(KEY, "gateway"))
        await gateway.client.ask(
            object, "POST", "/v1/sessions",
            RegisterSession(
                uid=SessionUid("s-1"), tenant=TenantName("acme"), project="", name="run",
                model="m", rank=8, created_us=START_US,
            ),
        )  # fmt: skip
        await gateway.submit(1)
        own = InboxCalls(client=client.as_meter(KEY, "s-1"))
        await own.register()
        assert len((await own.claim()).entries) == 1
        other = InboxCalls(client=client.as_meter(KEY, "s-2"))
        for call in (other.claim(), other.ack(1), own.claim(attempt=2), other.archive()):
            with pytest.raises(ForbiddenError):
                await call
        for call in (own.submit(2), own.close(), own.view(), own.poll("train", 1)):
            with pytest.raises(ForbiddenError):
                await call


def test_the_numbers_of_an_inbox_go_on_where_its_meter_stopped() -> None:
    assert inbox_rules.next_and_last([], None) == (1, 0)
    assert inbox_rules.next_and_last([1, 2, 4], None) == (3, 4)
    assert issubclass(SequenceConflictError, ConflictError)


async def test_f24_a_commit_that_failed_leaves_the_number_free(
    calls: InboxCalls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = inbox.keep, [1]

    def failing(*arguments: Any, **named: Any) -> Any:
        kept = real(*arguments, **named)
        if left.pop() == 1:
            left.append(0)
            raise UnavailableError("the database went away")
        left.append(0)
        return kept

    monkeypatch.setattr(inbox, "keep", failing)
    with pytest.raises(UnavailableError):
        await calls.submit(1, LARGE)
    assert (await calls.view()).waiting == 0
    assert not (await calls.submit(1, LARGE)).duplicate
    assert (await calls.submit(1, LARGE)).duplicate
    await calls.register()
    assert await taken(calls) == [("train", 1)]


@pytest.mark.parametrize(
    ("taken_positions", "skipped_positions"),
    [([2**63], []), ([-1], []), ([], [2**64 - 1]), ([1] * 1025, [])],
)
async def test_positions_that_cannot_be_are_refused_and_change_nothing(
    calls: InboxCalls, taken_positions: list[int], skipped_positions: list[int]
) -> None:
    await calls.submit(1)
    await calls.register()
    skipped = [InboxSkip(position=each, reason="no") for each in skipped_positions]
    message = AckInbox(attempt=1, taken=taken_positions, skipped=skipped)
    status, _body = await calls.client.call("POST", "/v1/sessions/s-1/inbox/ack", message)
    assert status in (400, 413)
    assert (await calls.view()).waiting == 1


async def test_a_reason_is_kept_whatever_characters_are_in_it(calls: InboxCalls) -> None:
    """A meter that could not acknowledge because of its words would be stuck with them."""
    await calls.submit(1)
    await calls.submit(2)
    await calls.register()
    await calls.ack(skipped=[InboxSkip(position=1, reason="no\0room")])
    await calls.close("stopped\0here")
    for number, words in ((1, "no\ufffdroom"), (2, "stopped\ufffdhere")):
        view = await calls.poll("train", number)
        assert view.state == "Skipped"
        assert view.error is not None
        assert words in view.error.message
