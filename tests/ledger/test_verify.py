"""Verification finds each way to falsify a chain, names the first row that is wrong, and says what is."""

import io
import itertools
from typing import Any, Final

import pytest

from gristmill_contracts import limits
from gristmill_contracts.chain import encoding, export
from gristmill_contracts.chain.export import Auditor, BrokenExportError, Report
from gristmill_contracts.chain.notes import SignedHead, open_note
from gristmill_contracts.chain.walk import BrokenChainError, Fault, Walk
from gristmill_contracts.usage import Counts
from gristmill_ledger.chain.heads import newest_notes
from gristmill_ledger.chain.pages import chain_head
from gristmill_ledger.database import Database
from gristmill_testing.falsified import (
    Row,
    audit,
    export_file,
    falsify,
    fill_chain,
    made_rows,
    rehash,
    rows_of,
    sign,
    signing_key,
)  # fmt: skip
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import NOW_US, post, register

AT: Final = {name: index for index, name in enumerate(encoding.COLUMNS)}
POSTGRESQL: Final = "postgresql"


def walk(rows: list[Row], heads: list[SignedHead] | None = None) -> Walk:
    walked = Walk(tenant="acme")
    walked.add(rows, heads or [])
    return walked


def fault_of(rows: list[Row], heads: list[SignedHead] | None = None) -> Fault:
    with pytest.raises(BrokenChainError) as caught:
        walk(rows, heads).finish(heads or [])
    return caught.value.fault


@pytest.fixture
def rows() -> list[Row]:
    """Nine rows of acme."""
    return made_rows()


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if value is None:
        return 0
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    return value + 1 if isinstance(value, int) else value + "x"


class TestRows:
    def test_an_honest_chain_is_verified_and_summed(self, rows: list[Row]) -> None:
        walked = walk(rows)
        assert (walked.seq, walked.rows, walked.unknown) == (9, 9, 1)
        assert walked.tokens == [80, 160, 40, 0]
        assert walked.hash == rows[-1][AT["hash"]]

    def test_it_may_be_walked_in_parts(self, rows: list[Row]) -> None:
        walked = Walk(tenant="acme")
        for row in rows:
            walked.add([row])
        assert (walked.rows, walked.hash) == (9, rows[-1][AT["hash"]])

    @pytest.mark.parametrize("column", encoding.COLUMNS)
    def test_a_changed_value_is_found_in_every_column(self, rows: list[Row], column: str) -> None:
        event_id = rows[4][AT["event_id"]]
        rows[4][AT[column]] = changed(rows[4][AT[column]])
        fault = fault_of(rows)
        assert (fault.tenant, fault.seq) == ("acme", 5)
        assert column in fault.what or (column == "seq" and "row 6" in fault.what)
        assert fault.event_id in (event_id, rows[4][AT["event_id"]], "")

    @pytest.mark.parametrize("bit", range(0, 256, 37))
    def test_a_changed_bit_of_a_hash_is_found(self, rows: list[Row], bit: int) -> None:
        digest = bytearray(rows[4][AT["hash"]])
        digest[bit // 8] ^= 1 << bit % 8
        rows[4][AT["hash"]] = bytes(digest)
        assert fault_of(rows).seq == 5

    @pytest.mark.parametrize(("name", "value"), [("kind", 7), ("n", "0"), ("n", 0.0), ("n", False), ("lease", None), ("sample", 5.0), ("model", ["tiny"]), ("hash", None), ("reason", object())])  # fmt: skip
    def test_a_value_of_another_type_is_found(self, rows: list[Row], name: str, value: Any) -> None:
        rows[4][AT[name]] = value
        assert fault_of(rows).seq == 5

    def test_unknown_usage_that_became_a_number_is_found(self, rows: list[Row]) -> None:
        for name in ("prefill", "cached_prefill", "sample", "train"):
            rows[2][AT[name]] = 0
        fault = fault_of(rows)
        assert (fault.seq, "payload_hash" in fault.what) == (3, True)

    @pytest.mark.parametrize("index", range(8))
    def test_a_dropped_row_is_missed(self, rows: list[Row], index: int) -> None:
        following = rows[index + 1][AT["event_id"]]
        del rows[index]
        fault = fault_of(rows)
        assert fault.seq == index + 1
        assert "missing" in fault.what
        assert following in fault.what

    def test_a_dropped_row_whose_followers_are_renumbered_is_found(self, rows: list[Row]) -> None:
        del rows[3]
        for seq, row in enumerate(rows, start=1):
            row[AT["seq"]] = seq
        fault = fault_of(rows)
        assert (fault.seq, "prev_hash" in fault.what) == (4, True)

    def test_a_row_given_twice_is_found(self, rows: list[Row]) -> None:
        rows.insert(5, rows[4])
        fault = fault_of(rows)
        assert (fault.seq, "twice" in fault.what) == (6, True)

    @pytest.mark.parametrize(("one", "other"), list(itertools.combinations(range(0, 9, 2), 2)))
    def test_two_swapped_rows_are_found(self, rows: list[Row], one: int, other: int) -> None:
        rows[one], rows[other] = rows[other], rows[one]
        assert fault_of(rows).seq == one + 1

    def test_two_rows_that_swapped_all_but_their_numbers_are_found(self, rows: list[Row]) -> None:
        rows[2], rows[5] = rows[5], rows[2]
        rows[2][AT["seq"]], rows[5][AT["seq"]] = 3, 6
        fault = fault_of(rows)
        assert (fault.seq, "prev_hash" in fault.what) == (3, True)

    def test_a_row_of_another_tenant_is_found(self, rows: list[Row]) -> None:
        other = rehash([[*row] for row in rows])
        for row in other:
            row[AT["tenant"]] = "other"
        fault = fault_of(rehash(other))
        assert (fault.seq, "tenant" in fault.what) == (1, True)

    def test_a_row_of_a_version_that_is_not_known_is_told(self, rows: list[Row]) -> None:
        rows[4][AT["enc_v"]] = 2
        fault = fault_of(rehash(rows))
        assert (fault.seq, "enc_v" in fault.what, "newer" in fault.what) == (5, True, True)

    @pytest.mark.parametrize("width", [0, 1, len(encoding.COLUMNS) - 1, len(encoding.COLUMNS) + 1])
    def test_a_row_of_another_width_is_found(self, rows: list[Row], width: int) -> None:
        rows[4] = (rows[4] + [0])[:width]
        assert fault_of(rows).seq == 5


class TestHeads:
    """A chain that was hashed anew agrees with itself: only signed heads tell."""

    def signed(self, rows: list[Row], seq: int) -> SignedHead:
        return SignedHead(tenant="acme", seq=seq, hash=rows[seq - 1][AT["hash"]], at_us=NOW_US)

    def test_an_honest_chain_is_that_of_its_heads(self, rows: list[Row]) -> None:
        heads = [self.signed(rows, seq) for seq in (1, 5, 9)]
        walk(rows, heads).finish(heads)

    def test_a_chain_rewritten_whole_is_found_at_the_first_head_behind_it(
        self, rows: list[Row]
    ) -> None:
        heads = [self.signed(rows, seq) for seq in (3, 7, 9)]
        rows[4][AT["sample"]] += 1
        rewritten = rehash(rows)
        assert walk(rewritten).rows == 9
        fault = fault_of(rewritten, heads)
        assert (fault.seq, "signed" in fault.what, "rewritten" in fault.what) == (7, True, True)

    @pytest.mark.parametrize("kept", [0, 4, 8])
    def test_an_end_that_was_cut_off_is_found(self, rows: list[Row], kept: int) -> None:
        fault = fault_of(rows[:kept], [self.signed(rows, 9)])
        assert (fault.seq, "missing" in fault.what) == (kept + 1, True)

    def test_without_a_head_a_cut_end_is_seen_by_the_ledgers_own_record(
        self, rows: list[Row]
    ) -> None:
        walked = walk(rows[:7])
        with pytest.raises(BrokenChainError, match="missing"):
            walked.finish([], last=(9, rows[8][AT["hash"]]))

    def test_a_record_of_another_hash_is_found(self, rows: list[Row]) -> None:
        with pytest.raises(BrokenChainError, match="another hash"):
            walk(rows).finish([], last=(9, bytes(32)))

    def test_two_heads_of_one_row_that_disagree_are_found(self, rows: list[Row]) -> None:
        """Somebody who holds the key showed two histories."""
        other = SignedHead(tenant="acme", seq=5, hash=bytes(32), at_us=NOW_US)
        assert fault_of(rows, [self.signed(rows, 5), other]).seq == 5


def audited(database: Database, **options: Any) -> Report:
    return audit(export_file(database), **options)


class TestDatabases:
    """The same through a database and an export, by somebody who may do everything to its tables."""

    def test_an_untouched_ledger_is_verified(self, database: Database) -> None:
        key = signing_key()
        for tenant in ("acme", "other"):
            fill_chain(database, tenant)
        sign(database, key)
        post(database, [make_event(10, session="s-acme")], "s-acme")
        report = audit(export_file(database, [key.verifier]), key.verifier)
        assert report.ok
        assert [(each.walk.tenant, each.walk.seq, each.signed_seq) for each in report.tenants] == [
            ("acme", 10, 9), ("other", 9, 9),
        ]  # fmt: skip
        head = database.read_now(lambda c: chain_head(c, "acme"))
        assert report.tenants[0].walk.hash == head.hash

    @pytest.mark.parametrize("column", [name for name in encoding.COLUMNS if name not in ("tenant", "seq", "outcome", "kind", "corrects", "reason", "completeness")])  # fmt: skip
    def test_a_column_changed_behind_our_back_is_found(
        self, database: Database, column: str
    ) -> None:
        fill_chain(database)
        value = "'x'"
        before = rows_of(database)[4][AT[column]]
        if isinstance(before, int) or column in ("prefill", "train"):
            value = f"{column} + 1"
        elif isinstance(before, bytes):
            postgresql = database.engine.dialect.name == POSTGRESQL
            value = f"'\\x{'07' * 32}'" if postgresql else f"X'{'07' * 32}'"
        falsify(database, f"UPDATE usage_event SET {column} = {value} WHERE seq = 5")
        (fault,) = audited(database).faults()
        assert (fault.tenant, fault.seq) == ("acme", 5)
        assert column in fault.what

    def test_a_deleted_row_is_found_and_the_other_tenant_is_not_blamed(
        self, database: Database
    ) -> None:
        fill_chain(database)
        fill_chain(database, "other")
        falsify(database, "DELETE FROM usage_event WHERE tenant = 'acme' AND seq = 4")
        report = audited(database)
        (fault,) = report.faults()
        assert (fault.tenant, fault.seq) == ("acme", 4)
        assert [each.walk.rows for each in report.tenants] == [3, 9]

    def test_a_cut_end_with_its_head_set_back_is_found_by_the_signed_head(
        self, database: Database
    ) -> None:
        """The row of the ledger's own head is state: whoever cuts the end changes it too."""
        key = signing_key()
        fill_chain(database)
        sign(database, key)
        seventh = rows_of(database)[6][AT["hash"]].hex()
        postgresql = database.engine.dialect.name == POSTGRESQL
        literal = f"'\\x{seventh}'" if postgresql else f"X'{seventh}'"
        falsify(
            database,
            "DELETE FROM usage_event WHERE seq > 7",
            f"UPDATE tenant_head SET seq = 7, hash = {literal}",
        )
        (fault,) = audit(export_file(database, [key.verifier])).faults()
        assert (fault.seq, "signed" in fault.what) == (8, True)

    def test_heads_that_were_kept_elsewhere_find_what_lost_its_heads_too(
        self, database: Database
    ) -> None:
        key = signing_key()
        fill_chain(database)
        sign(database, key)
        (note,) = database.read_now(newest_notes)
        kept = open_note(note.text, [key.verifier])
        content = export_file(database, [key.verifier])
        rows = rows_of(database)
        rows[4][AT["sample"]] += 1
        forged = self.forge(rehash(rows))
        assert audit(content, key.verifier, heads=[kept]).ok
        assert audit(forged).ok
        (fault,) = audit(forged, heads=[kept]).faults()
        assert (fault.seq, "rewritten" in fault.what) == (9, True)

    def forge(self, rows: list[Row]) -> bytes:
        parts = [
            export.header([], NOW_US),
            export.item("tenants", ["acme"]),
            export.item("tenant", "acme", 0, encoding.GENESIS),
            export.item("rows", rows),
            export.item("tenant_end", len(rows), rows[-1][AT["hash"]]),
            export.item("end", 1, len(rows)),
        ]
        return b"".join(parts)

    def test_a_forged_head_is_named(self, database: Database) -> None:
        fill_chain(database)
        sign(database, signing_key())
        (fault,) = audit(export_file(database), signing_key().verifier).faults()
        assert (fault.tenant, fault.seq) == ("acme", 9)
        assert "forged" in fault.what

    def test_a_head_of_another_tenant_proves_nothing(self, database: Database) -> None:
        key = signing_key()
        fill_chain(database)
        note = key.sign(SignedHead(tenant="other", seq=1, hash=bytes(32), at_us=1))
        parts = [
            export.header([key.verifier], NOW_US),
            export.item("tenant", "acme", 0, encoding.GENESIS),
            export.item("head", note),
            export.item("rows", rows_of(database)),
        ]
        auditor = Auditor(keys=[key.verifier])
        auditor.feed(export.read_items(io.BytesIO(b"".join(parts))))
        assert "other" in auditor.report().faults()[0].what


class TestExports:
    def test_rows_made_without_a_database_are_those_that_it_stores(
        self, database: Database
    ) -> None:
        fill_chain(database)
        stored, made = rows_of(database), made_rows()
        for row in (*stored, *made):
            row[AT["quarantined"]] = None
        assert rehash(stored) == rehash(made) == made

    def test_pages_are_parts_of_one_chain(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = signing_key()
        monkeypatch.setattr(limits, "CHAIN_PAGE_ROWS", 2)
        fill_chain(database)
        sign(database, key)
        report = audit(export_file(database, [key.verifier]))
        assert (report.ok, report.rows, report.tenants[0].signed_seq) == (True, 9, 9)

    def test_an_export_may_begin_behind_a_signed_head(self, database: Database) -> None:
        key = signing_key()
        fill_chain(database)
        sign(database, key)
        post(database, [make_event(10, session="s-acme")], "s-acme")
        report = audit(export_file(database, after=9), key.verifier)
        assert (report.ok, report.rows, report.tenants[0].first_seq) == (True, 1, 10)

    def test_one_that_begins_behind_a_row_that_nobody_signed_proves_nothing(
        self, database: Database
    ) -> None:
        fill_chain(database)
        (fault,) = audit(export_file(database, after=4)).faults()
        assert (fault.seq, "no signed head" in fault.what) == (4, True)

    @pytest.mark.parametrize("share", [0, 1, 5, 50, 90, 99])
    def test_a_torn_export_is_not_taken_for_a_whole_one(
        self, database: Database, share: int
    ) -> None:
        fill_chain(database)
        content = export_file(database)
        with pytest.raises(BrokenExportError):
            audit(content[: len(content) * share // 100])

    def test_every_changed_byte_of_an_export_is_found(self, database: Database) -> None:
        """Whatever is changed: the export is refused, or a fault is named. Only what vouches for nothing
        (when it was made, how it spells its list of tenants) may pass."""
        key = signing_key()
        register(database, "s-1", session="s-1")
        post(database, [make_event(1, key="GMK"), make_event(2, counts=None)], "s-1")
        sign(database, key)
        content = export_file(database, [key.verifier])
        start = content.index(export.item("tenant", "acme", 0, encoding.GENESIS))
        missed = []
        for index in range(start, len(content)):
            forged = bytearray(content)
            forged[index] ^= 0x01
            try:
                if audit(bytes(forged), key.verifier).ok:
                    missed.append(index)
            except BrokenExportError:
                pass
        assert missed == []

    @pytest.mark.parametrize("content", [b"", b"\x00", b"hello", b"\x80", b"\x81\x01", export.item("rows", []), export.item("end", 0, 1), export.item("nothing"), export.item("head", "x"), export.item("tenant", 1), export.item("rows", 5)])  # fmt: skip
    def test_what_is_no_export_is_refused(self, content: bytes) -> None:
        with pytest.raises(BrokenExportError):
            audit(content)

    def test_an_export_that_leaves_a_tenant_out_is_refused(self, database: Database) -> None:
        fill_chain(database)
        fill_chain(database, "other")
        content = export_file(database)
        cut = content[: content.index(export.item("tenant", "other", 0, encoding.GENESIS))]
        with pytest.raises(BrokenExportError, match="other"):
            audit(cut + export.item("end", 1, 9))

    def test_an_export_of_another_version_is_refused(self) -> None:
        content = export.item("export", export.FORMAT, 2, list(encoding.COLUMNS), [], 0)
        with pytest.raises(BrokenExportError, match="version"):
            audit(content)

    def test_an_empty_ledger_is_a_whole_export(self, database: Database) -> None:
        report = audit(export_file(database))
        assert (report.ok, report.rows, list(report.tenants)) == (True, 0, [])

    def test_quantities_of_63_bits_are_exact(self, database: Database) -> None:
        big = 2**63 - 1
        register(database)
        post(database, [make_event(n, counts=Counts(train=big)) for n in (1, 2)])
        (tenant,) = audit(export_file(database)).tenants
        assert tenant.as_json()["tokens"]["train"] == 2 * big
