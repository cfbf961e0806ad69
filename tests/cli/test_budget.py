"""`gristmill budget` against a real ledger."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from gristmill_cli.commands.budget import show
from gristmill_contracts.budgets import Lease
from gristmill_contracts.http import Empty, RegisterSession, TenantAccount
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.units import now_us
from gristmill_ledger.budgets import suspense
from gristmill_testing.budget_store import ask
from gristmill_testing.cli import Commands
from gristmill_testing.ledger import LedgerClient, running_ledger

Run = Callable[..., Any]


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[LedgerClient]:
    async with running_ledger(tmp_path) as opened:
        yield opened


@pytest.fixture
def run(commands: Commands, ledger: LedgerClient) -> Run:
    async def call(*arguments: str) -> Result:
        found: Result = await asyncio.to_thread(
            commands.run, "budget", *arguments, "--ledger-url", ledger.url
        )
        return found

    return call


async def test_a_budget_is_made_changed_shown_and_ended(run: Run) -> None:
    made = await run(
        "set", "monthly", "250.00", "-t", "acme", "--unit", "USD", "--every", "month",
        "--time-zone", "Europe/Amsterdam", "-o", "json",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    shown = json.loads(made.stdout)
    assert (shown["id"], shown["limit"]) == ("acme/monthly", 250 * 10**12)
    assert shown["shown"]["left"] == "250.00"
    # What is left out stays.
    changed = await run("set", "monthly", "300", "-t", "acme", "-o", "json")
    shown = json.loads(changed.stdout)
    assert (shown["unit"], shown["recurrence"], shown["time_zone"]) == (
        "USD", "month", "Europe/Amsterdam",
    )  # fmt: skip
    table = (await run("get", "monthly", "-t", "acme")).stdout
    assert "month (Europe/Amsterdam)" in table
    assert "300.00" in table
    assert (await run("end", "monthly", "-t", "acme")).exit_code == 0
    nothing = await run("list")
    assert "nothing is bounded" in nothing.stderr
    (ended,) = json.loads((await run("list", "--ended", "-o", "json")).stdout)
    assert ended["ended"]


async def test_what_is_wrong_is_said_in_one_line(run: Run) -> None:
    for arguments, words in (
        (("set", "b", "many"), "no amount"),
        (("set", "b", "1.5"), "no amount"),
        (("set", "b", "nan", "--unit", "USD"), "no amount"),
        (("set", "b", "1", "--unit", "dollars"), "unit"),
        (("set", "b", "1", "--time-zone", "Mars/Olympus"), "time zone"),
        (("set", "b", "1", "--scope-type", "session"), "scope is empty"),
        (("set", "b", "9" * 30), "more than a budget holds: 9,223,372,036,854,775,807 tokens"),
        (("set", "b", "9223373", "--unit", "USD"), "holds: 9,223,372.036854775807 USD"),
        (("get", "never"), "there is no budget"),
        (("end", "never"), "there is no budget"),
    ):
        found = await run(*arguments)
        assert found.exit_code == 1, arguments
        assert words in found.stderr
        assert len(found.stderr.splitlines()) == 1


async def test_what_is_in_suspense_is_decided(run: Run, ledger: LedgerClient) -> None:
    session = RegisterSession(
        uid=SessionUid("s-1"), tenant=TenantName("acme"), project="", name="n", model="tiny", rank=1,
        created_us=1,
    )  # fmt: skip
    await ledger.ask(Empty, "POST", "/v1/sessions", session)
    assert (await run("set", "all", "1000", "-t", "acme")).exit_code == 0
    lease = await ledger.ask(Lease, "POST", "/v1/leases", ask(1, 700))
    await ledger.ledger.database.write(lambda c: suspense.sweep(c, now_us() + 3_600_000_000))
    assert "700 are in suspense" in (await run("get", "all", "-t", "acme")).stderr
    assert lease.id in (await run("suspense")).stdout
    wrong = await run("resolve", lease.id, "acme/all", "--reason", "r")
    assert "--spent, or --unspent" in wrong.stderr
    decided = await run("resolve", lease.id, "acme/all", "--reason", "gone", "--spent")
    assert decided.exit_code == 0, decided.stderr
    shown = json.loads((await run("get", "all", "-t", "acme", "-o", "json")).stdout)
    assert (shown["period"]["late_posted"], shown["shown"]["left"]) == (700, "300")
    assert "nothing is in suspense" in (await run("suspense")).stderr


async def test_a_budget_for_what_nobody_knows_is_made_and_says_so(
    run: Run, ledger: LedgerClient
) -> None:
    await ledger.ask(TenantAccount, "PUT", "/v1/tenants/acme")
    misspelt = await run("set", "all", "10", "-t", "acmee", "-o", "json")
    assert misspelt.exit_code == 0
    shown = json.loads(misspelt.stdout)
    (warning,) = shown["warnings"]
    assert "nobody knows a tenant 'acmee'" in warning
    assert misspelt.stderr.splitlines() == [f"warning: {warning}"]
    assert "tenant 'acmee'" in (await run("get", "all", "-t", "acmee")).stderr
    for kind in ("session", "project"):
        arguments = ("-t", "acme", "--scope-type", kind, "--scope", "of-nobody")
        unknown = await run("set", kind, "10", *arguments)
        assert unknown.exit_code == 0
        assert f"nobody knows a {kind} 'of-nobody' in tenant acme" in unknown.stderr
    known = await run("set", "all", "10", "-t", "acme", "-o", "json")
    assert (known.stderr, json.loads(known.stdout)["warnings"]) == ("", [])


async def test_what_the_machine_knows_before_its_ledger_is_known(
    commands: Commands, ledger: LedgerClient
) -> None:
    commands.ok("keys", "create", "-t", "acme")
    (key,) = commands.json("keys", "list", "-t", "acme")
    mine = ("--scope-type", "key", "--scope")

    async def stderr(*arguments: str) -> str:
        found = await asyncio.to_thread(commands.run, "budget", "set", *arguments)
        assert found.exit_code == 0, found.output
        return str(found.stderr)

    with commands.pretend_running(ledger.url):
        assert await stderr("all", "10", "-t", "acme") == ""
        assert "tenant 'acmee'" in await stderr("all", "10", "-t", "acmee")
        assert await stderr("intern", "10", "-t", "acme", *mine, key["accessKeyId"]) == ""
        assert "key 'GM'" in await stderr("typo", "10", "-t", "acme", *mine, "GM")


async def test_an_ended_budget_is_listed_with_the_limit_that_it_had(run: Run) -> None:
    for limit in ("100", "250"):
        assert (await run("set", "b", limit, "-t", "acme", "--every", "day")).exit_code == 0
    assert (await run("end", "b", "-t", "acme")).exit_code == 0
    (ended,) = json.loads((await run("list", "--ended", "-o", "json")).stdout)
    assert (ended["ended"], ended["limit"], ended["shown"]["limit"]) == (True, 250, "250")


@pytest.mark.parametrize(
    ("unit", "amount", "text"),
    [
        ("tokens", 1_234_567, "1,234,567"),
        ("USD", 10**12, "1.00"),
        ("USD", 1, "0.000000000001"),
        ("USD", -(10**12) - 5 * 10**11, "-1.50"),
        ("USD", 1_234_567 * 10**12 + 10**9, "1,234,567.001"),
    ],
)
def test_amounts_are_shown_exactly(unit: str, amount: int, text: str) -> None:
    assert show(unit, amount) == text
