"""Ledger: what the routes of the audit answer (`/v1/chain/…`), besides the items of an export."""

from typing import Final

import msgspec

NEXT_AFTER_HEADER: Final = "Gristmill-Next-After"
"""Of a page of an export: `after` of the next one. Not there: it was the tenant's last."""


class ChainLengths(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows each tenant has: what a verification in parts is planned by. It proves nothing."""

    tenants: dict[str, int]


class ChainKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Verifier keys of the ledger's signed heads, as gristmill_contracts.chain.notes writes them."""

    keys: list[str]


class SignedNote(msgspec.Struct, frozen=True, kw_only=True):
    """A signed head."""

    tenant: str
    seq: int
    note: str
