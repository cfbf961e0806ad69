"""Signed heads: notes that any reader of log checkpoints opens, each hour once, copied to a second place."""

import asyncio
import base64
import hashlib
import stat
import subprocess
from functools import partial
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from gristmill_contracts.chain.notes import (
    ForgedHeadError,
    SignedHead,
    VerifierKey,
    open_note,
    read_key_pem,
)  # fmt: skip
from gristmill_contracts.errors import InvalidRequestError
from gristmill_ledger.artifacts import LocalArtifactStore
from gristmill_ledger.chain import keeper as keeper_module
from gristmill_ledger.chain.heads import HOUR_US, hour_slot, newest_notes, sign_heads
from gristmill_ledger.chain.keeper import Keeper
from gristmill_ledger.chain.keys import open_key
from gristmill_ledger.database import Database
from gristmill_ledger.metrics import Metrics
from gristmill_ledger.settings import LedgerSettings
from gristmill_testing.falsified import falsify, fill_chain, sign, signing_key
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import NOW_US, post, stored_rows

PEM = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f
-----END PRIVATE KEY-----
"""
HEAD = SignedHead(tenant="acme", seq=17, hash=bytes(range(32)), at_us=NOW_US)
GOLDEN_KEY = "ledger.example+d39ecdc2+AQOhB7/zzhC+HXDdGOdLwJln5NYwm6UNXx3chmQSVTG4"
GOLDEN_NOTE = (
    "ledger.example/acme\n"
    "17\n"
    "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n"
    "at 1764460801000000\n"
    "\n"
    "\u2014 ledger.example 057NwqGW4BYkHb7tQekXZghZJo/9/orIPjn4d+kG24bmj9Fu9jchHpz5v0y3g1PjcAGkKY/igY4zLtBuP51CjmWyvgo=\n"
)


def test_the_bytes_of_a_note_are_frozen() -> None:
    key = read_key_pem(PEM, "ledger.example")
    assert str(key.verifier) == GOLDEN_KEY
    assert key.sign(HEAD) == GOLDEN_NOTE
    assert open_note(GOLDEN_NOTE, [VerifierKey.parse(GOLDEN_KEY)]) == HEAD


def test_a_note_is_what_the_specification_of_signed_notes_says() -> None:
    """Taken apart by hand: text, empty line, dash, name, base64 of key id and signature."""
    key = signing_key("ledger.example")
    text, _, signature = key.sign(HEAD).partition("\n\n")
    origin, size, root, at = text.split("\n")
    assert (origin, size, at) == ("ledger.example/acme", "17", f"at {NOW_US}")
    assert base64.b64decode(root) == HEAD.hash
    dash, name, encoded = signature.rstrip("\n").split(" ")
    assert (dash, name) == ("\u2014", "ledger.example")
    raw = base64.b64decode(encoded)
    public = base64.b64decode(str(key.verifier).split("+", 2)[2])
    assert raw[:4] == hashlib.sha256(b"ledger.example\n" + public).digest()[:4]
    Ed25519PublicKey.from_public_bytes(public[1:]).verify(raw[4:], (text + "\n").encode())
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(public[1:]).verify(raw[4:], text.encode())


def test_any_changed_character_of_a_note_is_found() -> None:
    key = signing_key()
    note = key.sign(HEAD)
    for index in range(len(note)):
        changed = note[:index] + ("A" if note[index] != "A" else "B") + note[index + 1 :]
        with pytest.raises(ForgedHeadError):
            open_note(changed, [key.verifier])


@pytest.mark.parametrize(
    "note", ["", "x", "a\n1\nx\n\n", "\n\n\n", "a/b\n1\nAA==\nat 1\n\n\u2014 a AA==\n"]
)
def test_what_is_no_note_is_refused(note: str) -> None:
    with pytest.raises(ForgedHeadError):
        open_note(note, [signing_key().verifier])


def test_a_note_of_another_ledgers_key_is_refused() -> None:
    note = signing_key().sign(HEAD)
    with pytest.raises(ForgedHeadError, match="none of the keys"):
        open_note(note, [signing_key().verifier])
    with pytest.raises(ForgedHeadError, match="none of the keys"):
        open_note(note, [])


@pytest.mark.parametrize("text", ["", "a+b", "a+00000000+AQ==", "gristmill+12345678+" + "A" * 44])
def test_what_is_no_verifier_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="verifier key"):
        VerifierKey.parse(text)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\n"])
def test_a_name_that_a_note_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        read_key_pem(PEM, name)


def test_the_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    settings = LedgerSettings(data_dir=tmp_path / "new")
    first = open_key(settings)
    again = open_key(settings)
    assert first is not None
    assert again is not None
    assert str(first.verifier) == str(again.verifier)
    (path,) = (tmp_path / "new").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_that_openssl_made_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", path],
        check=True,
        capture_output=True,
    )
    key = open_key(LedgerSettings(data_dir=tmp_path, chain_key_file=path, chain_name="n"))
    assert key is not None
    assert open_note(key.sign(HEAD), [key.verifier]) == HEAD


def test_postgresql_signs_only_with_a_key_that_is_given(tmp_path: Path) -> None:
    settings = LedgerSettings(data_dir=tmp_path / "none", database_url="postgresql://u@h/d")
    assert open_key(settings) is None
    assert not (tmp_path / "none").exists()


def test_a_file_that_holds_no_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"PEM|key"):
        open_key(LedgerSettings(data_dir=tmp_path, chain_key_file=path))


def test_an_hour_is_signed_once_whoever_comes_first(
    database: Database, another_database: Database
) -> None:
    """Two replicas, and rows that came between them."""
    key = signing_key()
    fill_chain(database)
    slot = hour_slot(NOW_US)
    (note,) = database.write_now(partial(sign_heads, key=key, at_us=NOW_US, slot=slot))
    post(database, [make_event(10, session="s-acme")], "s-acme")
    later = NOW_US + 1
    assert another_database.write_now(partial(sign_heads, key=key, at_us=later, slot=slot)) == []
    assert [row["seq"] for row in stored_rows(database, "chain_checkpoint")] == [9]
    head = open_note(note.text, [key.verifier])
    last = stored_rows(database)[8]
    assert (head.tenant, head.seq, head.hash) == ("acme", 9, last["hash"])
    slot = hour_slot(NOW_US + HOUR_US)
    (second,) = another_database.write_now(partial(sign_heads, key=key, at_us=later, slot=slot))
    assert second.seq == 10


def test_a_head_that_did_not_move_is_not_signed_again(database: Database) -> None:
    key = signing_key()
    fill_chain(database)
    for hour in range(3):
        sign(database, key, at_us=NOW_US + hour * HOUR_US)
    assert len(stored_rows(database, "chain_checkpoint")) == 1


def keeper(database: Database, folder: Path | None = None) -> Keeper:
    copies = None
    if folder is not None:
        copies = LocalArtifactStore(root=folder, free_bytes_min=0)
        copies.open()
    return Keeper(database=database, metrics=Metrics(), key=signing_key(), copies=copies)


async def test_heads_are_copied_to_a_second_place(database: Database, tmp_path: Path) -> None:
    keeping = keeper(database, tmp_path)
    for tenant in ("acme", "other"):
        fill_chain(database, tenant)
    await keeping.sign()
    await keeping.copy()
    post(database, [make_event(10, session="s-acme")], "s-acme")
    keeping.signed_slot = ""
    assert keeping.key is not None
    sign(database, keeping.key, at_us=NOW_US + HOUR_US)
    await keeping.copy()
    files = sorted(tmp_path.glob("*/*.note"))
    assert [(path.parent.name, int(path.stem)) for path in files] == [
        ("acme", 9), ("acme", 10), ("other", 9),
    ]  # fmt: skip
    notes = {note.text for note in database.read_now(newest_notes)}
    assert {path.read_text() for path in files} >= notes


async def test_many_heads_are_signed_in_transactions_that_hold_up_nobody(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "HEADS_TOGETHER", 2)
    commits: list[float] = []
    tenants = [f"t-{n}" for n in range(5)]
    for tenant in tenants:
        fill_chain(database, tenant, rows=2)
    keeping = keeper(database)
    database.on_commit = commits.append
    await keeping.sign()
    assert len(commits) == 3
    rows = stored_rows(database, "chain_checkpoint")
    assert [(row["tenant"], row["seq"]) for row in rows] == [(tenant, 2) for tenant in tenants]
    keeping.signed_slot = ""
    await keeping.sign()
    assert len(commits) == 3, "none has moved"
    assert len(stored_rows(database, "chain_checkpoint")) == 5


async def test_a_copy_that_was_lost_is_made_again(database: Database, tmp_path: Path) -> None:
    fill_chain(database)
    first = keeper(database, tmp_path)
    await first.sign()
    await first.copy()
    (path,) = tmp_path.glob("*/*.note")
    path.unlink()
    await keeper(database, tmp_path).copy()
    assert path.exists()


async def test_new_rows_are_verified_behind_the_old_ones(database: Database) -> None:
    keeping = keeper(database)
    fill_chain(database)
    await keeping.verify()
    assert keeping.metrics.chain_verified._value.get() == 9
    post(database, [make_event(10, session="s-acme")], "s-acme")
    await keeping.verify()
    assert keeping.metrics.chain_verified._value.get() == 10
    assert keeping.metrics.chain_unverified._value.get() == 0
    assert keeping.walks["acme"].rows == 10


async def test_a_broken_chain_is_counted_once_and_named(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    keeping = keeper(database)
    fill_chain(database)
    fill_chain(database, "other")
    falsify(database, "UPDATE usage_event SET sample = 4 WHERE tenant = 'acme' AND seq = 5")
    await keeping.verify()
    await keeping.verify()
    assert keeping.metrics.chain_failures._value.get() == 1
    (record,) = [record for record in caplog.records if record.message == "chain_broken"]
    assert (record.tenant, record.seq) == ("acme", 5)  # type: ignore[attr-defined]
    assert keeping.metrics.chain_unverified._value.get() == 5


async def test_a_chain_that_lost_its_end_is_counted(database: Database) -> None:
    keeping = keeper(database)
    fill_chain(database)
    falsify(database, "DELETE FROM usage_event WHERE seq > 7")
    await asyncio.wait_for(keeping.verify(), 30)
    assert keeping.metrics.chain_failures._value.get() == 1
