"""The frozen bytes of a usage row, version 1, and the two SHA-256 over them.

A row is the CBOR array [facts, posting]: `facts` is what was used, `posting` how it came in.

    payload_hash = SHA-256(CBOR(facts))
    hash         = SHA-256(prev_hash || CBOR([facts, posting]))

Each is an array of values in the order below: integers, text, bytes and null in their shortest form
(RFC 8949 section 4.2.1), no floats, no maps, no tags. `facts` comes first and begins with the version,
so its bytes are encoded once for both hashes. `payload_hash` tells a resent operation from another one
with the same id: where it was posted from (producer, attempt, lease) is no part of it.

Nothing here ever changes: rows of every version stay verifiable. Another layout is another version.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import cbor2

VERSION: Final = 1
HASH_BYTES: Final = 32
GENESIS: Final = bytes(HASH_BYTES)
"""`prev_hash` of the first row of a tenant."""

FACTS: Final = (
    "enc_v", "event_id", "kind", "n", "tenant", "session", "stream", "number", "operation", "model",
    "project", "key", "outcome", "prefill", "cached_prefill", "sample", "train", "op_start_us",
    "op_end_us", "corrects", "reason",
)  # fmt: skip
POSTING: Final = (
    "seq", "producer", "producer_seq", "attempt", "lease", "completeness", "quarantined", "ingested_us",
    "payload_hash",
)  # fmt: skip
COLUMNS: Final = (*FACTS, *POSTING, "prev_hash", "hash")
"""Every column of a row, in the order of an export."""

Value = int | str | bytes | None

PAIR: Final = b"\x82"
"""Head of a CBOR array of two."""


def encode(values: Sequence[Value]) -> bytes:
    """A CBOR array of scalars. Deterministic: each value has one encoding."""
    return cbor2.dumps(values)


def payload_hash(facts: bytes) -> bytes:
    """SHA-256 of the encoded facts."""
    return hashlib.sha256(facts).digest()


def row_hash(prev_hash: bytes, facts: bytes, posting: bytes) -> bytes:
    """The link of a row to the one before it, from the encoded halves."""
    return hashlib.sha256(prev_hash + PAIR + facts + posting).digest()
