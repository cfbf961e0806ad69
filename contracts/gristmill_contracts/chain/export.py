"""An export of the ledger: what the audit needs, in one file that is verified without the ledger.

A CBOR sequence (RFC 8742) of arrays, each beginning with its kind:

    ["export", "gristmill-ledger", 1, [column, …], [verifier key, …], made at, UTC microseconds]
    ["tenants", [tenant, …]]
    ["tenant", tenant, after, hash of row `after`]      rows behind number `after` follow; 0 = from the first
    ["head", signed note]                               names a row behind `after`; before that row
    ["rows", [[value of each column], …]]
    ["tenant_end", last number, its hash]               the ledger's own record of where the chain ends
    ["end", tenants, rows]

A tenant's rows may come in several parts, each with its own "tenant" item that goes on where the last one
stopped: the pages that the ledger answers over HTTP are parts of a file as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import cbor2

from gristmill_contracts.chain import encoding
from gristmill_contracts.chain.notes import ForgedHeadError, SignedHead, VerifierKey, open_note
from gristmill_contracts.chain.walk import BrokenChainError, Fault, Walk
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.usage import TOKEN_TYPES

FORMAT: Final = "gristmill-ledger"
VERSION: Final = 1
MEDIA_TYPE: Final = "application/cbor-seq"

Item = list[Any]  # Any: values of an item, by its kind
Progress = Callable[[int], None]
"""Called with the number of rows verified so far."""


class BrokenExportError(InvalidRequestError):
    """The file is no export, or it is torn."""


def header(keys: Sequence[VerifierKey], made_us: int) -> bytes:
    """The first item of an export."""
    names = [str(key) for key in keys]
    return item("export", FORMAT, VERSION, list(encoding.COLUMNS), names, made_us)


def item(kind: str, *values: object) -> bytes:
    """One item of an export."""
    return cbor2.dumps([kind, *values])


def read_items(file: BinaryIO) -> Iterator[Item]:
    """The items of a file or a page, up to where it ends or is torn: an export that is whole says so
    itself. Raises BrokenExportError for bytes that are no item."""
    decoder = cbor2.CBORDecoder(file)
    while True:
        try:
            found = decoder.decode()
        except cbor2.CBORDecodeEOF:
            return
        except (cbor2.CBORDecodeError, ValueError, OverflowError) as error:
            raise BrokenExportError(f"the export holds what is no item: {error}") from error
        if not isinstance(found, list) or not found or not isinstance(found[0], str):
            raise BrokenExportError("the export holds an item without a kind; is it an export?")
        yield found


@dataclass(slots=True, kw_only=True)
class Auditor:
    """Verifies the items of an export in their order, tenant by tenant.

    What is wrong with a tenant's chain is kept as its fault, and the other tenants are verified all the
    same. An export that does not keep its own format raises BrokenExportError.
    """

    keys: Sequence[VerifierKey] = ()
    """Keys that heads must be signed by; none = those that the export itself tells."""
    heads: Sequence[SignedHead] = ()
    """Heads that were kept in a second place: the rows must be theirs too."""
    progress: Progress = lambda _rows: None
    joined: bool = False
    """Whoever joins the parts of a chain compares the hash that this one begins behind."""
    last: int | None = None
    """Number of the last row to verify: what follows is another part's. None = to the end."""
    reports: dict[str, "TenantReport"] = field(default_factory=dict)
    told_keys: list[VerifierKey] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    rows: int = 0
    whole: bool = False
    """The last item was there."""
    noted: set[SignedHead] = field(default_factory=set)
    """The heads of the tenant that is read now: one between two pages comes with both."""
    _walk: Walk | None = None
    _signed: list[SignedHead] = field(default_factory=list)

    def feed(self, items: Iterable[Item]) -> None:
        """Verify the next items."""
        for found in items:
            kind, *values = found
            handler = _HANDLERS.get(kind)
            if handler is None or self.whole:
                raise BrokenExportError(
                    f"item {kind[:40]!r} is unknown, or behind the end of the export"
                )
            try:
                handler(self, *values)
            except BrokenChainError as error:
                self._current.fault = error.fault
            except (TypeError, ValueError, AttributeError) as error:
                raise BrokenExportError(
                    f"an item {kind!r} has not the values it needs: {error}"
                ) from error

    def finish(self) -> "Report":
        """Raises BrokenExportError for an export without its end."""
        if not self.whole:
            raise BrokenExportError(
                f"the export is not whole: it ends after {self.rows} rows; fetch it again"
            )
        return self.report()

    def report(self) -> "Report":
        return Report(tenants=[self.reports[name] for name in sorted(self.reports)])

    @property
    def _current(self) -> "TenantReport":
        if self._walk is None:
            raise BrokenExportError("the export holds rows of no tenant")
        return self.reports[self._walk.tenant]

    def _export(
        self, name: str, version: int, columns: list[str], keys: list[str], _at: int
    ) -> None:
        if (name, version) != (FORMAT, VERSION) or tuple(columns) != encoding.COLUMNS:
            raise BrokenExportError(
                f"the export is {name!r} of version {version!r} with {len(columns)} columns; this program "
                f"reads {FORMAT!r} of version {VERSION}: use the version that made it, or a newer one"
            )
        self.told_keys = [VerifierKey.parse(text) for text in keys]

    def _tenants(self, names: list[str]) -> None:
        self.listed = list(names)

    def _tenant(self, tenant: str, after: int, digest: bytes) -> None:
        report = self.reports.get(tenant)
        if report is None:
            self._signed = [head for head in self.heads if head.tenant == tenant]
            self.noted = set()
            self._walk = Walk(tenant=tenant, seq=after, hash=digest)
            self.reports[tenant] = TenantReport(walk=self._walk, first_seq=after + 1)
            return
        self._walk = report.walk
        if report.fault is None and (after, digest) != (report.walk.seq, report.walk.hash):
            raise BrokenExportError(
                f"a part of tenant {tenant!r} begins behind row {after}, but row {report.walk.seq} was "
                "the last before it"
            )

    def _head(self, note: str) -> None:
        report = self._current
        walk = report.walk
        try:
            head = open_note(note, self.keys or self.told_keys)
        except ForgedHeadError as error:
            what = error.message
            fault = Fault(tenant=walk.tenant, seq=_claimed(note), event_id="", what=what)
            report.fault = report.fault or fault
            return
        if head.tenant != walk.tenant:
            what = f"the signed head of row {head.seq} is tenant {head.tenant!r}'s"
            raise BrokenChainError(Fault(tenant=walk.tenant, seq=head.seq, event_id="", what=what))
        if head in self.noted:
            return
        self.noted.add(head)
        report.heads += 1
        report.signed_seq = max(report.signed_seq, head.seq)
        self._signed.append(head)

    def _rows(self, rows: list[Sequence[Any]]) -> None:  # Any: column values
        report = self._current
        if self.last is not None:
            rows = rows[: max(0, self.last - report.walk.seq)]
        self.rows += len(rows)
        self.progress(self.rows)
        if report.fault is None:
            self._begin(report)
            report.walk.add([tuple(row) for row in rows], self._signed)

    def _begin(self, report: "TenantReport") -> None:
        """Whoever begins behind a row takes its hash from a signed head."""
        walk = report.walk
        if self.joined or walk.rows or (walk.seq, walk.hash) == (0, encoding.GENESIS):
            return
        if not any((head.seq, head.hash) == (walk.seq, walk.hash) for head in self._signed):
            what = "no signed head names the row and the hash that the export begins behind"
            raise BrokenChainError(Fault(tenant=walk.tenant, seq=walk.seq, event_id="", what=what))

    def _tenant_end(self, seq: int, digest: bytes) -> None:
        report = self._current
        report.ended = True
        if report.fault is None:
            self._begin(report)
            report.walk.finish(self._signed, last=(seq, digest))

    def _end(self, tenants: int, rows: int) -> None:
        missing = [name for name in self.listed if name not in self.reports]
        missing += [name for name, report in self.reports.items() if not report.ended]
        if missing or (tenants, rows) != (len(self.reports), self.rows):
            raise BrokenExportError(
                f"the export says {tenants} tenants and {rows} rows, and holds {len(self.reports)} and "
                f"{self.rows}" + (f"; not whole: {', '.join(missing[:5])}" if missing else "")
            )
        self.whole = True


@dataclass(slots=True, kw_only=True)
class TenantReport:
    """What was found of one tenant."""

    walk: Walk
    first_seq: int
    heads: int = 0
    """Signed heads that were checked."""
    signed_seq: int = 0
    """Rows that the newest of them names."""
    ended: bool = False
    fault: Fault | None = None

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        walk = self.walk
        fault = None
        if self.fault is not None:
            fault = {
                "seq": self.fault.seq,
                "event_id": self.fault.event_id,
                "what": self.fault.what,
            }
        return {
            "tenant": walk.tenant,
            "ok": self.fault is None,
            "first_seq": self.first_seq,
            "last_seq": walk.seq,
            "hash": walk.hash.hex(),
            "rows": walk.rows,
            "unknown": walk.unknown,
            "tokens": dict(zip(TOKEN_TYPES, walk.tokens, strict=True)),
            "heads": self.heads,
            "signed_seq": self.signed_seq,
            "fault": fault,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification found."""

    tenants: Sequence[TenantReport]

    @property
    def ok(self) -> bool:
        return all(each.fault is None for each in self.tenants)

    @property
    def rows(self) -> int:
        return sum(each.walk.rows for each in self.tenants)

    def faults(self) -> list[Fault]:
        """The first fault of each tenant that has one."""
        return [each.fault for each in self.tenants if each.fault is not None]


_HANDLERS: Final[dict[str, Callable[..., None]]] = {
    "export": Auditor._export,
    "tenants": Auditor._tenants,
    "tenant": Auditor._tenant,
    "head": Auditor._head,
    "rows": Auditor._rows,
    "tenant_end": Auditor._tenant_end,
    "end": Auditor._end,
}


def _claimed(note: str) -> int:
    """The number that a head claims, for a message: it is not to be believed."""
    lines = str(note).splitlines()
    return (
        int(lines[1][:18]) if len(lines) > 1 and lines[1].isascii() and lines[1].isdecimal() else 0
    )
