"""The audit's routes: pages of an export, heads on demand, keys; and who may read them."""

import io
from pathlib import Path

import msgspec
import pytest

from gristmill_contracts import limits
from gristmill_contracts.chain.export import MEDIA_TYPE, Auditor, read_items
from gristmill_contracts.chain.notes import VerifierKey, open_note
from gristmill_contracts.chain_http import NEXT_AFTER_HEADER, ChainKeys, SignedNote
from gristmill_contracts.errors import InvalidRequestError, UnavailableError
from gristmill_testing.ledger import LedgerClient, make_event, running_ledger

KEY = bytes(range(32))


async def fill(client: LedgerClient, rows: int = 5) -> None:
    await client.register("s-1")
    await client.post("s-1", [make_event(n) for n in range(1, rows + 1)])


async def test_pages_lead_to_each_other_and_the_last_one_says_so(
    migrated_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHAIN_PAGE_ROWS", 2)
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await fill(client)
        auditor = Auditor()
        after: str | None = "0"
        sizes = []
        while after is not None:
            url = f"{client.url}/v1/chain/export/acme?after={after}"
            async with client.http.get(url) as answer:
                assert answer.headers["Content-Type"] == MEDIA_TYPE
                after = answer.headers.get(NEXT_AFTER_HEADER)
                before = auditor.rows
                auditor.feed(read_items(io.BytesIO(await answer.read())))
                sizes.append(auditor.rows - before)
        assert sizes == [2, 2, 1]
        (report,) = auditor.report().tenants
        assert (report.fault, report.ended, report.walk.seq) == (None, True, 5)


async def test_a_head_is_signed_on_demand_and_again_only_once_it_moved(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        await fill(client)
        (text,) = (await client.ask(ChainKeys, "GET", "/v1/chain/keys")).keys
        first = await client.ask(SignedNote, "POST", "/v1/chain/heads/acme")
        assert open_note(first.note, [VerifierKey.parse(text)]).seq == first.seq == 5
        assert await client.ask(SignedNote, "POST", "/v1/chain/heads/acme") == first
        await client.post("s-1", [make_event(6)])
        second = await client.ask(SignedNote, "POST", "/v1/chain/heads/acme")
        heads = await client.ask(list[SignedNote], "GET", "/v1/chain/heads/acme")
        assert heads == [first, second]
        newer = await client.ask(list[SignedNote], "GET", "/v1/chain/heads/acme", after=5)
        assert newer == [second]


@pytest.mark.parametrize("path", ["export/acme?after=x", "export/acme?after=6", "export/acme?after=-1", "export/acme?more=1", "heads/acme?after=1.5", "export?after=1", "lengths?after=1"])  # fmt: skip
async def test_bad_questions_are_refused(migrated_url: str, tmp_path: Path, path: str) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await fill(client)
        status, body = await client.call("GET", f"/v1/chain/{path}")
        assert (status, msgspec.msgpack.decode(body)["code"]) == (400, "invalid_request")


async def test_a_tenant_without_rows_has_no_head_to_sign(tmp_path: Path) -> None:
    async with running_ledger(tmp_path) as client:
        with pytest.raises(InvalidRequestError, match="no row"):
            await client.ask(SignedNote, "POST", "/v1/chain/heads/nobody")


async def test_a_ledger_without_a_key_says_so(migrated_url: str, tmp_path: Path) -> None:
    async with running_ledger(tmp_path, database_url=migrated_url) as client:
        await fill(client)
        client.ledger.keeper.key = None
        with pytest.raises(UnavailableError, match="chain_key_file"):
            await client.ask(SignedNote, "POST", "/v1/chain/heads/acme")
        assert (await client.ask(ChainKeys, "GET", "/v1/chain/keys")).keys == []


async def test_in_a_cluster_services_audit_and_meters_do_not(tmp_path: Path) -> None:
    key_file = tmp_path / "cluster.key"
    key_file.write_bytes(KEY)
    async with running_ledger(tmp_path / "data", cluster_key_file=key_file) as client:
        paths = (
            "/v1/chain/export",
            "/v1/chain/export/acme",
            "/v1/chain/heads/acme",
            "/v1/chain/lengths",
        )
        for path in paths:
            assert (await client.call("GET", path))[0] == 401
            assert (await client.as_meter(KEY, "s-1").call("GET", path))[0] == 403
            assert (await client.as_service(KEY, "cli").call("GET", path))[0] == 200
