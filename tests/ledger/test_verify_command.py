"""`python -m gristmill_ledger verify`: in ranges, in parallel, from a checkpoint, and offline."""

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.notes import new_key_pem, open_note
from gristmill_contracts.errors import NotFoundError
from gristmill_ledger.__main__ import main
from gristmill_ledger.chain import verify
from gristmill_ledger.chain.heads import newest_notes
from gristmill_ledger.chain.keys import existing_key, open_key
from gristmill_ledger.chain.verify import verify_database
from gristmill_ledger.database import Database
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.falsified import export_file, falsify, fill_chain, sign, signing_key
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import NOW_US, post


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "RANGE_ROWS", 4)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9])
def test_ranges_of_any_length_are_the_whole_chain(
    database: Database, migrated_url: str, rows: int
) -> None:
    fill_chain(database, rows=rows)
    told: list[tuple[int, int]] = []
    report = verify_database(migrated_url, keys=[], progress=lambda *now: told.append(now))
    (found,) = report.tenants
    unknown = 1 if rows >= 3 else 0
    assert (report.ok, found.walk.rows, found.walk.unknown) == (True, rows, unknown)
    assert found.walk.tokens == [
        10 * (rows - unknown),
        20 * (rows - unknown),
        5 * (rows - unknown),
        0,
    ]
    assert told[-1] == (rows, rows)


@pytest.mark.parametrize("page", [1, 2, 3, 2000])
def test_a_range_is_fetched_in_pages_of_any_length(
    database: Database, migrated_url: str, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(limits, "CHAIN_PAGE_ROWS", page)
    fill_chain(database)
    assert verify_database(migrated_url, keys=[]).rows == 9
    falsify(database, "UPDATE usage_event SET n = 7 WHERE seq = 7")
    (fault,) = verify_database(migrated_url, keys=[]).faults()
    assert fault.seq == 7


def test_tenants_with_few_rows_share_a_connection(
    database: Database, migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "RANGE_ROWS", 6)
    opened: list[str] = []
    real = verify.open_engine

    def counting(url: str, **options: Any) -> Any:
        opened.append(url)
        return real(url, **options)

    monkeypatch.setattr(verify, "open_engine", counting)
    for n in range(7):
        fill_chain(database, f"t-{n}", rows=2)
    falsify(database, "UPDATE usage_event SET n = 7 WHERE tenant = 't-4' AND seq = 2")
    report = verify_database(migrated_url, keys=[])
    assert [(each.walk.tenant, each.walk.rows) for each in report.tenants] == [
        (f"t-{n}", 1 if n == 4 else 2) for n in range(7)
    ]
    # One to plan with, and one for each six rows or so.
    assert len(opened) == 1 + 3


@pytest.mark.parametrize("seq", range(1, 10))
def test_the_first_fault_is_named_wherever_the_ranges_part(
    database: Database, migrated_url: str, seq: int
) -> None:
    fill_chain(database)
    falsify(database, f"UPDATE usage_event SET n = 7 WHERE seq = {seq} OR seq = 9")
    (fault,) = verify_database(migrated_url, keys=[]).faults()
    assert (fault.seq, "payload_hash" in fault.what) == (seq, True)


@pytest.mark.parametrize("seq", [1, 4, 5, 8, 9])
def test_a_missing_row_is_named_wherever_the_ranges_part(
    database: Database, migrated_url: str, seq: int
) -> None:
    fill_chain(database)
    falsify(database, f"DELETE FROM usage_event WHERE seq = {seq}")
    (fault,) = verify_database(migrated_url, keys=[]).faults()
    assert (fault.seq, "missing" in fault.what) == (seq, True)


def test_rows_beyond_the_ledgers_own_record_are_found(
    database: Database, migrated_url: str
) -> None:
    fill_chain(database)
    falsify(database, "UPDATE tenant_head SET seq = 7")
    (fault,) = verify_database(migrated_url, keys=[]).faults()
    assert "names row 7" in fault.what


def test_processes_beside_each_other_find_the_same(database: Database, migrated_url: str) -> None:
    for tenant in ("acme", "other"):
        fill_chain(database, tenant)
    falsify(database, "UPDATE usage_event SET n = 7 WHERE tenant = 'other' AND seq = 6")
    one, two = (verify_database(migrated_url, keys=[], jobs=jobs) for jobs in (1, 2))
    assert one.faults() == two.faults()
    assert [each.as_json() for each in one.tenants] == [each.as_json() for each in two.tenants]


def test_from_a_checkpoint_only_what_came_after_it_is_read(
    database: Database, migrated_url: str
) -> None:
    key = signing_key()
    fill_chain(database)
    sign(database, key)
    post(database, [make_event(n, session="s-acme") for n in (10, 11)], "s-acme")
    falsify(database, "UPDATE usage_event SET n = 7 WHERE seq = 2")
    later = verify_database(migrated_url, keys=[key.verifier], from_checkpoint=True)
    assert (later.ok, later.rows, later.tenants[0].first_seq) == (True, 2, 10)
    falsify(database, "UPDATE usage_event SET n = 7 WHERE seq = 10")
    again = verify_database(migrated_url, keys=[key.verifier], from_checkpoint=True)
    assert again.faults()[0].seq == 10


def test_a_head_that_was_forged_is_no_checkpoint(database: Database, migrated_url: str) -> None:
    fill_chain(database)
    sign(database, signing_key())
    report = verify_database(migrated_url, keys=[signing_key().verifier], from_checkpoint=True)
    (fault,) = report.faults()
    assert (fault.seq, "forged" in fault.what, report.tenants[0].first_seq) == (9, True, 1)


def test_heads_that_were_kept_are_compared(database: Database, migrated_url: str) -> None:
    key = signing_key()
    fill_chain(database)
    sign(database, key)
    (note,) = database.read_now(newest_notes)
    kept = open_note(note.text, [key.verifier])
    other = type(kept)(tenant="acme", seq=12, hash=bytes(32), at_us=1)
    assert verify_database(migrated_url, keys=[], kept=[kept]).ok
    (fault,) = verify_database(migrated_url, keys=[], kept=[kept, other]).faults()
    assert (fault.seq, "signed" in fault.what) == (10, True)


def test_a_tenant_that_there_is_not_is_refused(database: Database, migrated_url: str) -> None:
    fill_chain(database)
    with pytest.raises(NotFoundError, match="acme"):
        verify_database(migrated_url, keys=[], tenants=["nobody"])


class TestCommand:
    """Exit status 0, 1 for a broken chain, 2 where nothing could be verified."""

    @pytest.fixture
    def settings(
        self, database: Database, migrated_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> LedgerSettings:
        made = open_key(LedgerSettings(database_url=f"sqlite:///{tmp_path}/x"))
        assert made is not None
        monkeypatch.setenv("GRISTMILL_LEDGER_DATABASE_URL", migrated_url)
        monkeypatch.setenv("GRISTMILL_LEDGER_CHAIN_KEY_FILE", str(tmp_path / "chain-key.pem"))
        fill_chain(database)
        sign(database, made)
        return LedgerSettings()

    def test_a_good_chain(
        self, settings: LedgerSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["verify", "--jobs", "1", "-o", "json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (found["ok"], found["rows"], found["tenants"][0]["signed_seq"]) == (True, 9, 9)

    def test_a_broken_chain(
        self, settings: LedgerSettings, database: Database, capsys: pytest.CaptureFixture[str]
    ) -> None:
        falsify(database, "UPDATE usage_event SET attempt = 9 WHERE seq = 3")
        assert main(["verify", "-j", "1"]) == 1
        printed = capsys.readouterr().out
        event_id = make_event(3, session="s-acme").event_id
        assert f"BROKEN acme row 3 {event_id}: hash is not that of the row" in printed

    def test_what_cannot_be_verified(
        self, settings: LedgerSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["verify", "-t", "nobody"]) == 2
        assert main(["verify", "--offline", str(tmp_path / "none")]) == 2
        assert main(["verify", "--key", "x+y+z"]) == 2
        assert capsys.readouterr().err.count("error: ") == 3

    def test_a_file_without_the_ledger(
        self, settings: LedgerSettings, database: Database, tmp_path: Path
    ) -> None:
        key = existing_key(settings)
        assert key is not None
        content = export_file(database, [key.verifier])
        good, bad = tmp_path / "good.cbor", tmp_path / "bad.cbor"
        good.write_bytes(content)
        bad.write_bytes(content.replace(b"tiny", b"tinz", 1))
        (tmp_path / "key.txt").write_text(f"{key.verifier}\n")
        heads = tmp_path / "heads" / "acme"
        heads.mkdir(parents=True)
        (note,) = database.read_now(newest_notes)
        (heads / "9.note").write_text(note.text)
        options = ["--key", str(tmp_path / "key.txt"), "--heads", str(tmp_path / "heads")]
        assert main(["verify", "--offline", str(good), *options]) == 0
        assert main(["verify", "--offline", str(bad), *options]) == 1
        assert main(["verify", "--offline", str(good), "--key", str(signing_key().verifier)]) == 1

    @pytest.mark.parametrize("told", [True, False], ids=["old key told", "old key forgotten"])
    def test_after_a_change_of_keys_every_head_is_verified(
        self,
        settings: LedgerSettings,
        database: Database,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        told: bool,
    ) -> None:
        """The heads before it are signed by the key before it, which the settings name."""
        assert settings.chain_key_file is not None
        old = existing_key(settings)
        assert old is not None
        settings.chain_key_file.write_bytes(new_key_pem())
        new = existing_key(settings)
        assert new is not None
        post(database, [make_event(10, session="s-acme")], "s-acme")
        sign(database, new, at_us=NOW_US + 1)
        if told:
            monkeypatch.setenv("GRISTMILL_LEDGER_CHAIN_OLD_KEYS", f"{old.verifier} {new.verifier}")
        assert main(["verify", "-o", "json"]) == (0 if told else 1)
        (found,) = json.loads(capsys.readouterr().out)["tenants"]
        assert (found["signed_seq"], found["heads"]) == (10, 2 if told else 1)
        assert told or "forged" in found["fault"]["what"]


def test_the_select_reads_the_columns_of_the_chain() -> None:
    assert verify.NAMES.split(", ") == list(encoding.COLUMNS)
