"""Budgets over HTTP: who may do what, bad input, pages, metrics, and a database that is away."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts.budgets import (
    BudgetPage,
    BudgetView,
    Decide,
    Denied,
    Lease,
    LeaseAnswer,
    OpenLease,
    PutBudget,
    Renewed,
    RenewLease,
    ReturnLease,
    SuspensePage,
    TakeLease,
)
from gristmill_contracts.cluster_http import HeartbeatAnswer
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    InvalidRequestError,
    NotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from gristmill_contracts.http import Empty, RegisterSession
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.usage import Counts
from gristmill_ledger.budgets import suspense
from gristmill_testing.budget_store import ask, tokens
from gristmill_testing.ledger import LedgerClient, make_event, make_heartbeat, running_ledger

KEY = bytes(range(32))


@pytest.fixture
async def client(migrated_url: str, tmp_path: Path) -> AsyncIterator[LedgerClient]:
    async with running_ledger(tmp_path, database_url=migrated_url) as opened:
        await register(opened, "s-1")
        yield opened


async def register(client: LedgerClient, uid: str, tenant: str = "acme") -> None:
    message = RegisterSession(
        uid=SessionUid(uid), tenant=TenantName(tenant), project="p", name=uid, model="tiny", rank=8,
        created_us=1,
    )  # fmt: skip
    await client.ask(Empty, "POST", "/v1/sessions", message)


def budget(limit: int, **changes: Any) -> PutBudget:
    fields: dict[str, Any] = {"scope_type": "tenant", "scope": "acme", "unit": "tokens"}
    return PutBudget(**(fields | {"limit": limit} | changes))


async def put(client: LedgerClient, limit: int, name: str = "all", **changes: Any) -> BudgetView:
    message = budget(limit, **changes)
    return await client.ask(BudgetView, "PUT", f"/v1/budgets/acme/{name}", message)


async def take(client: LedgerClient, message: TakeLease) -> LeaseAnswer:
    status, body = await client.call("POST", "/v1/leases", message)
    assert status == 200, body
    found: LeaseAnswer = msgspec.msgpack.decode(body, type=LeaseAnswer)
    return found


async def test_a_lease_is_taken_spent_and_given_back(client: LedgerClient) -> None:
    await put(client, 1000)
    await client.register("s-1")
    lease = await take(client, ask(1, 10))
    assert isinstance(lease, Lease)
    await client.post("s-1", [make_event(1, counts=Counts(train=4), lease=lease.id)])
    (opened,) = await client.ask(list[OpenLease], "GET", "/v1/leases", session="s-1")
    assert (opened.id, opened.rest, opened.suspended) == (lease.id, {"acme/all": 6}, False)
    path = f"/v1/leases/{lease.id}"
    same = RenewLease(session=SessionUid("s-1"), attempt=1)
    assert (await client.ask(Renewed, "POST", f"{path}/renew", same)).rest == {"acme/all": 6}
    over = ReturnLease(session=SessionUid("s-1"), attempt=1, keep={})
    assert (await client.ask(Renewed, "POST", f"{path}/return", over)).rest == {}
    assert await client.ask(list[OpenLease], "GET", "/v1/leases", session="s-1") == []
    view = await client.ask(BudgetView, "GET", "/v1/budgets/acme/all")
    assert (view.period.posted, view.period.available) == (4, 996)


async def test_leases_that_wait_together_are_answered_for_themselves(client: LedgerClient) -> None:
    await put(client, 100)
    answers = await asyncio.gather(*(take(client, ask(n, 10)) for n in range(1, 21)))
    assert sum(isinstance(each, Lease) for each in answers) == 10
    assert sum(isinstance(each, Denied) for each in answers) == 10
    view = await client.ask(BudgetView, "GET", "/v1/budgets/acme/all")
    assert (view.period.reserved, view.period.available) == (100, 0)


async def test_one_request_that_is_wrong_stops_no_other(client: LedgerClient) -> None:
    await put(client, 100)
    answers = await asyncio.gather(
        take(client, ask(1, 10)),
        client.ask(Lease, "POST", "/v1/leases", ask(2, 10, session="unknown")),
        return_exceptions=True,
    )
    assert isinstance(answers[0], Lease)
    assert isinstance(answers[1], NotFoundError)


async def test_a_heartbeat_renews_leases_and_tells_of_changed_budgets(client: LedgerClient) -> None:
    await put(client, 1000)
    lease = await take(client, ask(1, 10))
    assert isinstance(lease, Lease)
    beat = make_heartbeat("s-1")
    beat.leases = [lease.id, "not-mine"]
    answer = await client.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", [beat])
    assert answer.leases == {lease.id: pytest.approx(limits.BUDGET_LEASE_S, abs=30)}
    assert answer.budgets == {"s-1": lease.version}
    await put(client, 2000)
    answer = await client.ask(HeartbeatAnswer, "POST", "/v1/heartbeats", [beat])
    assert answer.budgets == {"s-1": lease.version + 1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"limit": -1}, "limit"),
        ({"limit": 2**63}, "limit"),
        ({"unit": "dollars"}, "unit"),
        ({"unit": "usd"}, "unit"),
        ({"scope": "other"}, "scope"),
        ({"scope": ""}, "scope"),
        ({"scope": "a\0b", "scope_type": "session"}, "scope"),
        ({"scope": "s" * 5000, "scope_type": "session"}, "scope"),
        ({"time_zone": "Mars/Olympus"}, "time zone"),
        ({"time_zone": "../../etc/passwd"}, "time zone"),
        ({"thresholds": (0,)}, "threshold"),
        ({"thresholds": (101,)}, "threshold"),
        ({"thresholds": (50, 50)}, "threshold"),
        ({"thresholds": tuple(range(1, 18))}, "threshold"),
    ],
)
async def test_a_budget_that_cannot_be_is_refused_by_field(
    client: LedgerClient, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        await put(client, **({"limit": 1} | changes))
    assert (await client.ask(BudgetPage, "GET", "/v1/budgets")).budgets == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "firm"}, {"recurrence": "year"}, {"scope_type": "galaxy"}, {"limit": 1.5},
        {"limit": "1"}, {"below_posted": "maybe"}, {"source": "rumour"},
    ],
)  # fmt: skip
async def test_a_budget_of_no_known_form_is_refused(
    client: LedgerClient, wrong: dict[str, Any]
) -> None:
    fields = msgspec.structs.asdict(budget(1)) | wrong
    with pytest.raises(InvalidRequestError):
        await client.ask(BudgetView, "PUT", "/v1/budgets/acme/all", fields)


@pytest.mark.parametrize("name", ["a b", "-a", "a-", "ä", "a" * 129])
async def test_a_name_that_cannot_be_is_refused(client: LedgerClient, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="budget name"):
        await put(client, 1, name)


async def test_what_never_changes_of_a_budget_is_a_conflict(client: LedgerClient) -> None:
    await put(client, 1)
    for changes in ({"unit": "USD"}, {"recurrence": "day"}, {"time_zone": "Europe/Amsterdam"}):
        with pytest.raises(ConflictError, match="never changes"):
            await put(client, 1, **changes)


async def test_a_limit_below_what_is_posted_must_be_meant(client: LedgerClient) -> None:
    await put(client, 1000)
    await client.register("s-1")
    lease = await take(client, ask(1, 500))
    assert isinstance(lease, Lease)
    await client.post("s-1", [make_event(1, counts=Counts(train=500), lease=lease.id)])
    with pytest.raises(ConflictError, match="500 tokens posted"):
        await put(client, 499)
    assert (await client.ask(BudgetView, "GET", "/v1/budgets/acme/all")).limit == 1000
    assert (await put(client, 499, below_posted="block")).period.available == 0
    # Upward, but still below: nothing to refuse.
    assert (await put(client, 499)).limit == 499


@pytest.mark.parametrize(
    "changes",
    [
        {"need": Counts(train=-1)}, {"need": Counts(prefill=2**63)}, {"least": Counts(sample=-1)},
        {"seq": -1}, {"attempt": -1}, {"session": ""}, {"model": ""}, {"key": "a\0"},
    ],
)  # fmt: skip
async def test_a_lease_that_cannot_be_is_refused(
    client: LedgerClient, changes: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"seq": 1, "need": tokens(1)} | changes
    with pytest.raises(InvalidRequestError):
        await client.ask(Lease, "POST", "/v1/leases", ask(fields.pop("seq"), **fields))


async def test_a_keep_that_cannot_be_is_refused(client: LedgerClient) -> None:
    wrong = ReturnLease(session=SessionUid("s-1"), attempt=1, keep={"acme/all": -1})
    with pytest.raises(InvalidRequestError, match="keep"):
        await client.ask(Renewed, "POST", "/v1/leases/x/return", wrong)


async def test_a_budget_ends_and_its_facts_stay(client: LedgerClient) -> None:
    await put(client, 5)
    await client.ask(Empty, "DELETE", "/v1/budgets/acme/all")
    await client.ask(Empty, "DELETE", "/v1/budgets/acme/all")
    assert (await take(client, ask(1, 10))).holds == []  # type: ignore[union-attr]
    assert (await client.ask(BudgetPage, "GET", "/v1/budgets")).budgets == []
    (ended,) = (await client.ask(BudgetPage, "GET", "/v1/budgets", ended="true")).budgets
    assert (ended.ended, ended.limit, ended.period.limit) == (True, 5, 5)
    assert not (await put(client, 5)).ended
    assert isinstance(await take(client, ask(2, 10)), Denied)
    with pytest.raises(NotFoundError):
        await client.ask(Empty, "DELETE", "/v1/budgets/acme/never")


async def test_budgets_are_listed_in_pages(client: LedgerClient) -> None:
    for n in range(5):
        await put(client, n, f"b{n}")
    await put(client, 7, "mine", scope_type="session", scope="s-1")
    first = await client.ask(BudgetPage, "GET", "/v1/budgets", tenant="acme", limit=4)
    assert [each.name for each in first.budgets] == ["b0", "b1", "b2", "b3"]
    rest = await client.ask(BudgetPage, "GET", "/v1/budgets", after=str(first.next_after))
    assert ([each.name for each in rest.budgets], rest.next_after) == (["b4", "mine"], None)
    of_session = await client.ask(
        BudgetPage, "GET", "/v1/budgets", scope_type="session", scope="s-1"
    )
    assert [each.name for each in of_session.budgets] == ["mine"]
    for wrong in ({"scope_type": "x"}, {"ended": "perhaps"}, {"limit": "0"}, {"colour": "red"}):
        with pytest.raises(InvalidRequestError):
            await client.ask(BudgetPage, "GET", "/v1/budgets", **wrong)


async def test_what_is_in_suspense_is_listed_and_decided(client: LedgerClient) -> None:
    await put(client, 1000)
    lease = await take(client, ask(1, 10))
    assert isinstance(lease, Lease)
    far_us = 2**62
    await client.ledger.database.write(lambda c: suspense.sweep(c, far_us))
    (found,) = (await client.ask(SuspensePage, "GET", "/v1/suspense", tenant="acme")).suspense
    assert (found.lease, found.budget, found.amount) == (lease.id, "acme/all", 10)
    decision = Decide(kind="void", reason="the node never ran")
    path = f"/v1/suspense/{lease.id}/acme/all"
    await client.ask(Empty, "POST", path, decision)
    await client.ask(Empty, "POST", path, decision)
    assert (await client.ask(SuspensePage, "GET", "/v1/suspense")).suspense == []
    with pytest.raises(InvalidRequestError, match="reason"):
        await client.ask(Empty, "POST", path, Decide(kind="void", reason=""))


async def test_denials_and_figures_are_told_to_prometheus(client: LedgerClient) -> None:
    await put(client, 2 * 10**12, unit="USD")
    await put(client, 5, "mine", scope_type="session", scope="s-1")
    assert isinstance(await take(client, ask(1, 10)), Denied)
    _, body = await client.call("GET", "/metrics")
    text = body.decode()
    assert 'gristmill_budget_limit{budget="all",tenant="acme",unit="USD"} 2.0' in text
    assert "mine" not in text
    assert 'gristmill_budget_denials_total{reason="exhausted",tenant="acme"} 1.0' in text


async def test_a_threshold_is_logged_once(
    client: LedgerClient, caplog: pytest.LogCaptureFixture
) -> None:
    await put(client, 100)
    await client.register("s-1")
    lease = await take(client, ask(1, 60))
    assert isinstance(lease, Lease)
    with caplog.at_level(logging.WARNING):
        event = make_event(1, counts=Counts(train=60), lease=lease.id)
        await client.post("s-1", [event])
        await client.post("s-1", [event])
    told = [each for each in caplog.records if each.message == "budget_threshold_passed"]
    assert [(each.percent, each.used) for each in told] == [(50, 60)]  # type: ignore[attr-defined]


async def test_f44_a_ledger_whose_database_is_away_grants_nothing(
    client: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a lease out of nothing: what a meter has leased is all that it may spend meanwhile."""
    await put(client, 100)

    def away(*_args: object) -> None:
        raise UnavailableError("the database is away")

    monkeypatch.setattr(client.ledger.database, "_commit", away)
    with pytest.raises(UnavailableError):
        await client.ask(Lease, "POST", "/v1/leases", ask(1, 10))
    monkeypatch.undo()
    assert (await take(client, ask(1, 10))).holds[0].amount == 10  # type: ignore[union-attr]


async def test_in_a_cluster_each_may_do_its_own(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    async with running_ledger(tmp_path / "data", cluster_key_file=key_file) as opened:
        operator, cli = opened.as_service(KEY, "operator"), opened.as_service(KEY, "cli")
        meter, gateway = opened.as_meter(KEY, "s-1"), opened.as_service(KEY, "gateway")
        await register(operator, "s-1")
        await put(operator, 100, "tenant", source="resource")
        await put(cli, 50, "by-hand")
        with pytest.raises(ConflictError, match=r"spec\.budget"):
            await put(cli, 200, "tenant")
        with pytest.raises(ConflictError, match=r"spec\.budget"):
            await cli.ask(Empty, "DELETE", "/v1/budgets/acme/tenant")
        with pytest.raises(ForbiddenError):
            await put(cli, 200, "tenant", source="resource")
        with pytest.raises(ForbiddenError):
            await put(gateway, 1, "mine")
        with pytest.raises(ForbiddenError):
            await put(meter, 10**9, "mine")
        with pytest.raises(ForbiddenError):
            await meter.ask(BudgetPage, "GET", "/v1/budgets")
        with pytest.raises(UnauthenticatedError):
            await put(opened, 1)
        lease = await take(meter, ask(1, 10))
        assert isinstance(lease, Lease)
        for wrong in (ask(2, 1, session=SessionUid("s-2")), ask(2, 1, attempt=2)):
            with pytest.raises(ForbiddenError):
                await meter.ask(Lease, "POST", "/v1/leases", wrong)
        with pytest.raises(ForbiddenError):
            await meter.ask(list[OpenLease], "GET", "/v1/leases", session="s-2")
        await opened.as_meter(KEY, "s-1", 2).register("s-1", attempt=2)
        with pytest.raises(FencedError):
            await meter.ask(Lease, "POST", "/v1/leases", ask(3, 1))
        newer = opened.as_meter(KEY, "s-1", 2)
        end = ReturnLease(session=SessionUid("s-1"), attempt=2, keep={})
        assert (await newer.ask(Renewed, "POST", f"/v1/leases/{lease.id}/return", end)).rest == {}
        await operator.ask(Empty, "DELETE", "/v1/budgets/acme/tenant", source="resource")


async def test_a_budget_says_what_it_names_that_nobody_told_of(
    tmp_path: Path, migrated_url: str
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await register(client, "s-1")
        assert (await put(client, 5)).unheard_of == ""
        for scope_type, known in (("session", "s-1"), ("project", "p")):
            mine: dict[str, Any] = {"scope_type": scope_type}
            assert (await put(client, 5, known, scope=known, **mine)).unheard_of == ""
            unknown = await put(client, 5, f"x-{known}", scope=f"x-{known}", **mine)
            assert unknown.unheard_of == scope_type
        # Of another tenant: not the one that is meant.
        await register(client, "x-s-1", "other")
        listed = await client.ask(BudgetPage, "GET", "/v1/budgets", scope="x-s-1")
        assert [each.unheard_of for each in listed.budgets] == ["session"]
        misspelt = budget(5, scope="acmee")
        made = await client.ask(BudgetView, "PUT", "/v1/budgets/acmee/all", misspelt)
        assert made.unheard_of == "tenant"
        await register(client, "s-2", "acmee")
        listed = await client.ask(BudgetPage, "GET", "/v1/budgets", tenant="acmee")
        assert [each.unheard_of for each in listed.budgets] == [""]


async def test_an_ended_budget_keeps_the_limit_that_it_had_in_every_period(
    tmp_path: Path, migrated_url: str
) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await put(client, 4, recurrence="day")
        await put(client, 5, recurrence="day")
        await client.ask(Empty, "DELETE", "/v1/budgets/acme/all")
        ended = await client.ask(BudgetView, "GET", "/v1/budgets/acme/all")
        assert (ended.ended, ended.limit, ended.period.limit) == (True, 5, 5)
