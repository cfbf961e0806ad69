"""`gristmill verify` against a real ledger: it computes everything again on this side of the wire."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts.chain.notes import new_key_pem, read_key_pem
from gristmill_testing.cli import Commands
from gristmill_testing.ledger import LedgerClient, make_event, running_ledger

ROWS = 7


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[LedgerClient]:
    """Two tenants with seven events each."""
    async with running_ledger(tmp_path / "ledger") as client:
        for tenant in ("acme", "other"):
            await client.register(tenant, tenant=tenant, session=tenant)
            events = [make_event(n, tenant=tenant, session=tenant) for n in range(1, ROWS + 1)]
            await client.post(tenant, events)
        yield client


async def run(commands: Commands, ledger: LedgerClient | None, *options: str, code: int = 0) -> Any:
    """The JSON that the command prints, or its whole output if it prints none."""
    url = ["--ledger-url", ledger.url] if ledger else []
    arguments = ["verify", *url, *options]
    result = await asyncio.to_thread(commands.run, *arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return json.loads(result.stdout) if "json" in options else result.output


def falsify(tmp_path: Path, statement: str) -> None:
    with sqlite3.connect(tmp_path / "ledger" / "ledger.sqlite3", isolation_level=None) as database:
        database.execute("DROP TRIGGER usage_event_no_UPDATE")
        database.execute("DROP TRIGGER usage_event_no_DELETE")
        database.execute(statement)
    database.close()


async def test_every_row_is_verified_and_summed(commands: Commands, ledger: LedgerClient) -> None:
    found = await run(commands, ledger, "--sign", "-o", "json")
    assert (found["ok"], found["rows"]) == (True, 2 * ROWS)
    acme, other = found["tenants"]
    assert (acme["tenant"], acme["last_seq"], acme["signed_seq"]) == ("acme", ROWS, ROWS)
    assert acme["tokens"] == {"prefill": 70, "cached_prefill": 140, "sample": 35, "train": 0}
    assert other["rows"] == ROWS


async def test_the_table_is_for_people(commands: Commands, ledger: LedgerClient) -> None:
    output = await run(commands, ledger, "-t", "acme")
    assert "TENANT" in output
    assert "other" not in output
    assert "--key gristmill+" in output


async def test_a_changed_row_is_named_with_code_3(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    falsify(tmp_path, "UPDATE usage_event SET train = 5 WHERE tenant = 'other' AND seq = 4")
    found = await run(commands, ledger, "-o", "json", code=3)
    assert found["tenants"][0]["ok"]
    fault = found["tenants"][1]["fault"]
    assert fault["seq"] == 4
    assert fault["event_id"] == make_event(4, session="other").event_id
    assert "payload_hash" in fault["what"]
    assert "broken: tenant other, row 4" in await run(commands, ledger, code=3)


async def test_a_key_that_is_not_the_ledgers_finds_its_heads_forged(
    commands: Commands, ledger: LedgerClient
) -> None:
    await run(commands, ledger, "--sign", "-o", "json")
    key = (await run(commands, ledger, "--show-key")).strip()
    assert key.startswith("gristmill+")
    await run(commands, ledger, "--key", key)
    stranger = str(read_key_pem(new_key_pem(), "gristmill").verifier)
    assert "forged" in await run(commands, ledger, "--key", stranger, code=3)


async def test_heads_of_the_key_before_are_verified_after_a_change_of_keys(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    """By a ledger that tells both keys, and offline by whoever kept what it told."""
    await run(commands, ledger, "--sign")
    old = (await run(commands, ledger, "--show-key")).strip()
    key, file, kept = tmp_path / "new.pem", tmp_path / "audit.cbor", tmp_path / "ledger.key"
    key.write_bytes(new_key_pem())
    new = str(read_key_pem(key.read_bytes(), "gristmill").verifier)
    async with running_ledger(
        tmp_path / "ledger", chain_key_file=key, chain_old_keys=old
    ) as changed:
        await changed.register("acme", tenant="acme", session="acme")
        await changed.post("acme", [make_event(ROWS + 1, tenant="acme", session="acme")])
        kept.write_text(await run(commands, changed, "--show-key"))
        assert kept.read_text().split() == [new, old]
        online = await run(commands, changed, "--sign", "--export", str(file), "-o", "json")
        assert [each["signed_seq"] for each in online["tenants"]] == [ROWS + 1, ROWS]
        await run(commands, changed, "--key", str(kept))
        assert "forged" in await run(commands, changed, "--key", new, code=3)
    assert (
        await run(commands, None, "--offline", str(file), "--key", str(kept), "-o", "json")
        == online
    )
    await run(commands, None, "--offline", str(file), "--key", new, "--key", old)
    kept.write_text("\n")
    assert "empty" in await run(commands, None, "--offline", str(file), "--key", str(kept), code=1)


async def test_an_export_is_verified_without_the_ledger(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    file = tmp_path / "audit.cbor"
    online = await run(commands, ledger, "--sign", "--export", str(file), "-o", "json")
    key = (await run(commands, ledger, "--show-key")).strip()
    offline = await run(commands, None, "--offline", str(file), "--key", key, "-o", "json")
    assert offline == online
    content = file.read_bytes()
    file.write_bytes(content.replace(b"completed", b"failed---", 1))
    await run(commands, None, "--offline", str(file), "--key", key, code=3)
    file.write_bytes(content[:-5])
    assert "not whole" in await run(commands, None, "--offline", str(file), code=1)


async def test_an_export_of_one_tenant_is_whole(
    commands: Commands, ledger: LedgerClient, tmp_path: Path
) -> None:
    file = tmp_path / "acme.cbor"
    await run(commands, ledger, "-t", "acme", "--export", str(file))
    found = await run(commands, None, "--offline", str(file), "-o", "json")
    assert [each["tenant"] for each in found["tenants"]] == ["acme"]


async def test_from_a_checkpoint_only_what_came_after_it_is_read(
    commands: Commands, ledger: LedgerClient
) -> None:
    await run(commands, ledger, "--sign")
    await ledger.post("acme", [make_event(ROWS + 1, tenant="acme", session="acme")])
    found = await run(commands, ledger, "--from-checkpoint", "-o", "json")
    assert [(each["first_seq"], each["rows"]) for each in found["tenants"]] == [
        (ROWS + 1, 1), (ROWS + 1, 0),
    ]  # fmt: skip


async def test_a_tenant_without_usage_is_told(commands: Commands, ledger: LedgerClient) -> None:
    assert "known: acme, other" in await run(commands, ledger, "-t", "nobody", code=1)


@pytest.mark.parametrize("options", [["--offline", "none"], ["--offline", "x", "--sign"], ["--key", "a+b+c"], ["--ledger-url", "http://127.0.0.1:9"]])  # fmt: skip
async def test_what_cannot_be_verified_is_an_error(commands: Commands, options: list[str]) -> None:
    assert (await run(commands, None, *options, code=1)).startswith("error: ")
