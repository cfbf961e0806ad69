"""Verification: walk the rows of a tenant and compute again all that they claim.

Pure: rows come from a database, from a file or over HTTP. The first row that is wrong is named, and what
is wrong with it. Signed heads tell what only they can: that a chain was rewritten whole, or lost its end.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import cbor2

from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.notes import SignedHead
from gristmill_contracts.usage import TOKEN_TYPES

Row = Sequence[Any]  # Any: a value read from outside, of whatever type
"""The values of a row in the order of `encoding.COLUMNS`."""

_AT: Final = {name: index for index, name in enumerate(encoding.COLUMNS)}
_SEQ: Final = _AT["seq"]
_TENANT: Final = _AT["tenant"]
_TOKENS: Final = slice(_AT["prefill"], _AT["train"] + 1)
_POSTING: Final = slice(len(encoding.FACTS), len(encoding.FACTS) + len(encoding.POSTING))
_FACTS: Final = slice(0, len(encoding.FACTS))
_PAYLOAD: Final = _AT["payload_hash"]
_PREV: Final = _AT["prev_hash"]
_HASH: Final = _AT["hash"]
_EVENT: Final = _AT["event_id"]
_WIDTH: Final = len(encoding.COLUMNS)
_FACT_NAMES: Final = ", ".join(encoding.FACTS)
_POSTING_NAMES: Final = ", ".join(encoding.POSTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The first thing that is wrong with a tenant's chain."""

    tenant: str
    seq: int
    event_id: str
    """Empty where no row is to be seen."""
    what: str


class BrokenChainError(Exception):
    """Carries a Fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.tenant} row {fault.seq} {fault.event_id}: {fault.what}")
        self.fault = fault


@dataclass(slots=True, kw_only=True)
class Walk:
    """How far a tenant's rows are verified. `tokens` counts those that are known, of all kinds."""

    tenant: str
    seq: int = 0
    hash: bytes = encoding.GENESIS
    rows: int = 0
    unknown: int = 0
    """Rows whose usage is unknown."""
    tokens: list[int] = field(default_factory=lambda: [0] * len(TOKEN_TYPES))

    def add(self, rows: Iterable[Row], heads: Sequence[SignedHead] = ()) -> None:
        """Verify the next rows, and that each signed head among them is theirs.

        Raises BrokenChainError at the first row that is not as it must be.
        """
        signed: dict[int, list[SignedHead]] = {}
        for head in heads:
            if head.tenant == self.tenant:
                signed.setdefault(head.seq, []).append(head)
        sha256, dumps, pair = hashlib.sha256, cbor2.dumps, encoding.PAIR
        tenant, seq, digest = self.tenant, self.seq, self.hash
        prefill, cached, sample, train = self.tokens
        try:
            for row in rows:
                seq += 1
                try:
                    facts = dumps(row[_FACTS])
                    payload = sha256(facts).digest()
                    link = sha256(digest + pair + facts + dumps(row[_POSTING])).digest()
                    right = (
                        row[_HASH] == link and row[_PAYLOAD] == payload and row[_PREV] == digest
                        and row[_SEQ] == seq and row[_TENANT] == tenant and row[0] == encoding.VERSION
                    )  # fmt: skip
                except (TypeError, IndexError, ValueError, cbor2.CBOREncodeError):
                    right = False
                if not right or len(row) != _WIDTH:
                    seq -= 1
                    raise BrokenChainError(_diagnose(row, tenant, seq + 1, digest))
                if seq in signed:
                    _compare(signed[seq], row, link)
                digest = link
                one, two, three, four = row[_TOKENS]
                if one is None:
                    self.unknown += 1
                    continue
                prefill += one
                cached += two
                sample += three
                train += four
        finally:
            self.rows += seq - self.seq
            self.seq, self.hash = seq, digest
            self.tokens = [prefill, cached, sample, train]

    def finish(self, heads: Iterable[SignedHead], *, last: tuple[int, bytes] | None = None) -> None:
        """No row comes any more. Raises BrokenChainError where a signed head, or the ledger's own
        record of its last row (number, hash), tells of more or others."""
        for head in sorted(heads, key=lambda head: head.seq):
            if head.tenant == self.tenant and head.seq > self.seq:
                raise BrokenChainError(
                    self._lost(head.seq, f"a head that was signed at {head.at_us} us names")
                )
        if last is not None and last[0] > self.seq:
            raise BrokenChainError(self._lost(last[0], "the ledger's head names"))
        if last is not None and last != (self.seq, self.hash):
            what = f"the ledger's head names row {last[0]} as the last one, by another hash than row {self.seq} has"
            raise BrokenChainError(Fault(tenant=self.tenant, seq=self.seq, event_id="", what=what))

    def _lost(self, seq: int, who: str) -> Fault:
        what = f"the row is missing: the chain ends at row {self.seq}, but {who} row {seq}"
        return Fault(tenant=self.tenant, seq=self.seq + 1, event_id="", what=what)


def _compare(heads: Sequence[SignedHead], row: Row, digest: bytes) -> None:
    for head in heads:
        if head.hash != digest:
            what = (
                f"the chain up to here is not the one whose head was signed at {head.at_us} us: rows at "
                "or before it were rewritten, and hashed anew"
            )
            event_id = str(row[_EVENT])
            raise BrokenChainError(
                Fault(tenant=head.tenant, seq=head.seq, event_id=event_id, what=what)
            )


def _diagnose(row: Row, tenant: str, seq: int, prev_hash: bytes) -> Fault:
    """What is wrong with a row that should be number `seq` behind `prev_hash`."""
    if not isinstance(row, list | tuple) or len(row) != _WIDTH:
        what = f"the row has not the {_WIDTH} columns of this version"
        return Fault(tenant=tenant, seq=seq, event_id="", what=what)
    found, event_id = row[_SEQ], str(row[_EVENT])
    if isinstance(found, int) and found > seq:
        what = f"the row is missing: row {found} ({event_id}) follows row {seq - 1}"
        return Fault(tenant=tenant, seq=seq, event_id="", what=what)
    what = next(_complaints(row, tenant, seq, prev_hash))
    return Fault(tenant=tenant, seq=seq, event_id=event_id, what=what)


def _complaints(row: Row, tenant: str, seq: int, prev_hash: bytes) -> Iterator[str]:
    named = dict(zip(encoding.COLUMNS, row, strict=True))
    for name, value, remark in (
        ("seq", seq, "the number is given twice, or out of order"),
        ("tenant", tenant, "the row is another tenant's"),
        ("enc_v", encoding.VERSION, "changed, or of a newer version than this program"),
    ):
        if named[name] != value:
            yield f"{name} is {named[name]!r}, not {value!r}: {remark}"
    if named["prev_hash"] != prev_hash:
        yield "prev_hash is not the hash of the row before it"
    try:
        facts = encoding.encode(row[_FACTS])
        posting = encoding.encode(row[_POSTING])
    except (TypeError, ValueError, cbor2.CBOREncodeError) as error:
        yield f"a column holds what no row holds: {error}"
        return
    if named["payload_hash"] != encoding.payload_hash(facts):
        yield f"payload_hash is not that of the facts: it or one of {_FACT_NAMES} was changed"
    if named["hash"] != encoding.row_hash(prev_hash, facts, posting):
        yield f"hash is not that of the row: it or one of {_POSTING_NAMES} was changed"
