"""A chain that is verified in parts, beside each other: how it is split, and the findings joined. Pure.

A part begins with the hash that somebody tells of the row before it. Whether that row deserves it, the
part that ends there says: so parts need no order, and together they prove what one walk proves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill_contracts.chain.export import TenantReport
from gristmill_contracts.chain.notes import SignedHead
from gristmill_contracts.chain.walk import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows of a tenant behind number `after`, up to `last`; None = to the end, wherever that is by then."""

    tenant: str
    after: int
    last: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the verification of a part found."""

    part: Part
    begins: bytes | None
    """The hash that was told of row `after`; None = there is no such row."""
    report: TenantReport
    heads: frozenset[SignedHead]


def split(tenant: str, after: int, rows: int, size: int) -> list[Part]:
    """Parts of `size` rows behind number `after` of a chain that had that many; the last one is open."""
    ends = [*range(after + size, rows, size)]
    return [
        Part(tenant=tenant, after=start, last=last)
        for start, last in zip([after, *ends], [*ends, None], strict=True)
    ]


def join(found: Sequence[Found]) -> TenantReport:
    """One report of all parts of a tenant: what one walk would have said. Faults behind the first are
    nobody's concern, for a walk ends there."""
    first, *others = sorted(found, key=lambda each: each.part.after)
    joined, heads = first.report, set(first.heads)
    for each in others:
        if joined.fault is not None:
            break
        _check_link(joined, each)
        if joined.fault is None:
            heads |= each.heads
            _add(joined, each.report)
    joined.heads = len(heads)
    joined.signed_seq = max((head.seq for head in heads), default=0)
    return joined


def _check_link(joined: TenantReport, following: Found) -> None:
    walk, after = joined.walk, following.part.after
    seq = after
    if walk.seq != after:
        seq = walk.seq + 1
        what = f"the row is missing: the chain ends at row {walk.seq}, but the ledger told of more just before"
    elif following.begins is None:
        what = "the row is missing to whoever begins behind it, but was there just before or after"
    elif following.begins != walk.hash:
        what = "whoever begins behind the row is told another hash than the row has"
    else:
        return
    joined.fault = Fault(tenant=walk.tenant, seq=seq, event_id="", what=what)


def _add(joined: TenantReport, more: TenantReport) -> None:
    walk, other = joined.walk, more.walk
    walk.rows += other.rows
    walk.unknown += other.unknown
    walk.tokens = [one + another for one, another in zip(walk.tokens, other.tokens, strict=True)]
    walk.seq, walk.hash = other.seq, other.hash
    joined.ended, joined.fault = more.ended, more.fault
