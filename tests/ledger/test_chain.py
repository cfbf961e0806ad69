"""The frozen bytes of a row: golden vectors that no later version may change, and what the chain holds."""

import hashlib
from typing import Any

import cbor2
import pytest
from msgspec import structs

from gristmill_contracts.chain import encoding
from gristmill_contracts.usage import Counts
from gristmill_ledger import schema
from gristmill_ledger.database import Database
from gristmill_ledger.decisions import encode_event, payload_hash
from gristmill_testing.ledger import make_event
from gristmill_testing.ledger_store import post, register, stored_rows

BIG = 2**63 - 1
PLAIN = make_event(1, key="GMK1", lease="l-1")
UNKNOWN = make_event(
    BIG, outcome="unknown", counts=None, project="prüfung", op_start_us=-1, op_end_us=0, n=24
)
WIDE = make_event(
    3, counts=Counts(prefill=23, cached_prefill=24, sample=2**53 + 1, train=BIG), kind="attempt"
)
GOLDEN_FACTS: dict[str, tuple[Any, str]] = {
    "plain": (
        PLAIN,
        (
            "9501782431366332633364642d333466372d353931632d623135332d366234636333363037316539"
            "657573616765006461636d6563732d31636c6f67016673616d706c656474696e796064474d4b3169"
            "636f6d706c657465640a1405001b000644c48b3440011b000644c48b3440026060"
        ),
    ),
    "unknown": (
        UNKNOWN,
        (
            "9501782462373963646133652d323065372d353662312d393635622d313232303437356162343431"
            "65757361676518186461636d6563732d31636c6f671b7fffffffffffffff6673616d706c65647469"
            "6e79687072c3bc66756e676067756e6b6e6f776ef6f6f6f620006060"
        ),
    ),
    "wide": (
        WIDE,
        (
            "9501782462653839396263352d616364652d353963342d626438352d663137663638353135356134"
            "67617474656d7074006461636d6563732d31636c6f67036673616d706c656474696e79606069636f"
            "6d706c657465641718181b00200000000000011b7fffffffffffffff1b000644c48b3440031b0006"
            "44c48b3440046060"
        ),
    ),
}
GOLDEN_HASHES = [
    "f58309b4247a438f92546996b3813d83d419e5777abf1a540b4ee6450b724fcc",
    "3744b54a2eb3e9f208d30a2f4787a82ef1f9ff3312bd33d05815777be687c1ce",
    "dec69b2676d6ad6565d7a319d129b89b999ef63ceac072e3a0b31f7e35ef324d",
]
"""Of the three above, in one chain, ingested at NOW_US by producer p."""


def test_every_column_of_a_row_is_in_the_chain() -> None:
    assert set(encoding.COLUMNS) == {column.name for column in schema.usage_event.columns}
    assert len(encoding.COLUMNS) == len(set(encoding.COLUMNS))


@pytest.mark.parametrize("name", GOLDEN_FACTS)
def test_the_bytes_of_facts_are_frozen(name: str) -> None:
    event, golden = GOLDEN_FACTS[name]
    assert encode_event(event).facts.hex() == golden


def test_the_hashes_of_rows_are_frozen(database: Database) -> None:
    register(database)
    events = enumerate((PLAIN, UNKNOWN, WIDE), start=1)
    post(database, [structs.replace(event, producer_seq=seq) for seq, event in events])
    assert [row["hash"].hex() for row in stored_rows(database)] == GOLDEN_HASHES


def test_a_row_hashes_as_its_description_says(database: Database) -> None:
    """Computed here from the columns alone, with no code of ours but their order."""
    register(database)
    post(database, [make_event(1), make_event(2, counts=None)])
    prev_hash = bytes(32)
    for row in stored_rows(database):
        facts = [row[name] for name in encoding.FACTS]
        posting = [row[name] for name in encoding.POSTING]
        assert row["payload_hash"] == hashlib.sha256(cbor2.dumps(facts)).digest()
        assert row["prev_hash"] == prev_hash
        prev_hash = hashlib.sha256(prev_hash + cbor2.dumps([facts, posting])).digest()
        assert row["hash"] == prev_hash
    assert stored_rows(database, "tenant_head") == [{"tenant": "acme", "seq": 2, "hash": prev_hash}]


def test_the_encoding_is_plain_cbor_that_any_reader_decodes() -> None:
    encoded = encode_event(WIDE)
    assert cbor2.loads(encoded.facts) == list(encoded.values)
    assert cbor2.dumps(list(encoded.values), canonical=True) == encoded.facts


def test_where_an_event_was_posted_from_is_no_part_of_its_payload() -> None:
    assert payload_hash(make_event(1, attempt=2, producer_seq=9, lease="l")) == payload_hash(
        make_event(1)
    )


@pytest.mark.parametrize(
    "change",
    [{"key": "GMK2"}, {"project": "p"}, {"counts": None}, {"counts": Counts()}, {"op_end_us": 0}],
)
def test_every_fact_is_part_of_the_payload(change: dict[str, Any]) -> None:
    assert payload_hash(make_event(1, **change)) != payload_hash(make_event(1))


def test_an_event_whose_id_is_not_that_of_its_operation_is_kept_and_flagged(
    database: Database,
) -> None:
    register(database)
    post(database, [make_event(1), make_event(2, event_id="00000000-0000-5000-8000-000000000000")])
    flags = [row["quarantined"] for row in stored_rows(database)]
    assert "event_id" not in flags[0].split(",")
    assert "event_id" in flags[1].split(",")
