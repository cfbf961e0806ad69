"""Where a verification takes its items from: a ledger, page by page, or a file that was exported.

What comes from a ledger may be kept as a file meanwhile: the pages are parts of an export as they are.
"""

import io
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

import msgspec

from gristmill_cli.cluster.ledger import LedgerAccess
from gristmill_cli.errors import CommandError
from gristmill_cli.local.ledger_client import reported
from gristmill_contracts.chain import export
from gristmill_contracts.chain.export import Auditor, Item, Report, read_items
from gristmill_contracts.chain.notes import SignedHead, VerifierKey, open_note
from gristmill_contracts.chain_http import NEXT_AFTER_HEADER, ChainKeys, ChainLengths, SignedNote
from gristmill_contracts.errors import NotFoundError

T = TypeVar("T")
TIMEOUT_S: Final = 120


class LedgerChains:
    """The chains of a ledger, over HTTP. Every call raises the ledger's error, or CommandError."""

    def __init__(self, access: LedgerAccess) -> None:
        self._access = access

    def verifier_keys(self) -> list[VerifierKey]:
        """The keys that the ledger says it signs with."""
        body, _ = self._call("GET", "/v1/chain/keys")
        return [VerifierKey.parse(text) for text in _decoded(body, ChainKeys).keys]

    def sign(self, tenant: str) -> None:
        """Have the head of a tenant signed as it is now."""
        self._call("POST", f"/v1/chain/heads/{_quoted(tenant)}")

    def newest_head(self, tenant: str, keys: Sequence[VerifierKey]) -> SignedHead | None:
        """The newest signed head of a tenant. Raises ForgedHeadError."""
        newest = None
        after = 0
        while True:
            path = f"/v1/chain/heads/{_quoted(tenant)}?after={after}"
            notes = _decoded(self._call("GET", path)[0], list[SignedNote])
            if not notes:
                return newest
            newest = open_note(notes[-1].note, keys)
            after = notes[-1].seq

    def lengths(self) -> dict[str, int] | None:
        """Tenant -> rows, as the ledger says; None = it is of the release before, and tells none."""
        try:
            body, _ = self._call("GET", "/v1/chain/lengths")
        except NotFoundError:
            return None
        return _decoded(body, ChainLengths).tenants

    def start(self) -> tuple[Item, list[str]]:
        """What an export of this ledger begins with, and which tenants there are."""
        body, _ = self._call("GET", "/v1/chain/export")
        items = list(read_items(io.BytesIO(body)))
        if [found[0] for found in items] != ["export", "tenants"]:
            raise CommandError(f"{self._access.url} answers what is no export; is it a ledger?")
        return items[0], items[1][1]

    def pages(self, tenant: str, after: int) -> Iterator[bytes]:
        """All items of one tenant behind a row."""
        at: str | None = str(after)
        while at is not None:
            body, at = self._call("GET", f"/v1/chain/export/{_quoted(tenant)}?after={at}")
            yield body

    def _call(self, method: str, path: str) -> tuple[bytes, str | None]:
        """The answer, and where the next page goes on."""
        url = f"{self._access.url}{path}"
        request = urllib.request.Request(url, headers=self._access.headers, method=method)  # noqa: S310 - our ledger
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return answer.read(), answer.headers.get(NEXT_AFTER_HEADER)
        except urllib.error.HTTPError as error:
            raise reported(error.code, error.read()) from error
        except OSError as error:
            raise CommandError(
                f"the ledger at {self._access.url} does not answer ({error}); see `gristmill status`"
            ) from error


def verify_ledger(
    chains: LedgerChains,
    auditor: Auditor,
    *,
    tenants: Sequence[str],
    starts: dict[str, int],
    keep: BinaryIO | None,
) -> Report:
    """Verify these tenants, or all, on this side. starts: tenant -> number of a signed head to begin behind.
    keep: a file that becomes an export of the same rows."""

    def take(body: bytes) -> None:
        if keep is not None:
            keep.write(body)
        auditor.feed(read_items(io.BytesIO(body)))

    header, known = chains.start()
    unknown = [name for name in tenants if name not in known]
    if unknown:
        raise CommandError(
            f"tenant {unknown[0]!r} has used nothing; known: {', '.join(known) or 'none'}"
        )
    names = list(tenants) or known
    take(export.item(*header) + export.item("tenants", names))
    for name in names:
        for body in chains.pages(name, starts.get(name, 0)):
            take(body)
            if keep is None and auditor.reports[name].fault is not None:
                break
    if all(report.ended for report in auditor.reports.values()):
        take(export.item("end", len(names), auditor.rows))
        return auditor.finish()
    return auditor.report()


def verify_file(path: Path, auditor: Auditor) -> Report:
    """Verify an export, without any ledger."""
    try:
        with path.open("rb") as file:
            auditor.feed(read_items(file))
    except OSError as error:
        raise CommandError(f"the export {path} cannot be read: {error}") from error
    return auditor.finish()


def _quoted(tenant: str) -> str:
    return urllib.parse.quote(tenant, safe="")


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise CommandError(
            f"the ledger's answer cannot be read: {error}; is it a ledger?"
        ) from error
