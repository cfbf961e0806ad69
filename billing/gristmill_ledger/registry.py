"""Tenants with their account ids, and sessions. Registering twice is registering once."""

from typing import Final, TypeVar

import msgspec
from sqlalchemy import Connection, select

from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.http import RegisterSession, TenantAccount
from gristmill_contracts.ids import TenantName
from gristmill_contracts.units import now_us
from gristmill_ledger import checks, schema
from gristmill_ledger.counters import lock_counter, set_counter
from gristmill_ledger.database import insert_or_skip

Found = TypeVar("Found")
ACCOUNT_ID_LAST: Final = 999_999_999_999
SESSION_IDENTITY: Final = ("tenant", "project", "name", "model")


def put_tenant(connection: Connection, name: str) -> TenantAccount:
    """The tenant's account; the first call allocates the next 12-digit id."""
    tenant = TenantName(checks.tenant_name(name))
    account_id = find_account_id(connection, tenant)
    if account_id is None:
        last = lock_counter(connection, "account_id")
        # Whoever held the lock before may have made the same tenant.
        account_id = find_account_id(connection, tenant)
        if account_id is None:
            account_id = _allocate(connection, tenant, last)
    return TenantAccount(tenant=tenant, account_id=account_id)


def find_account_id(connection: Connection, tenant: TenantName) -> str | None:
    table = schema.tenant.c
    return connection.execute(
        select(table.account_id).where(table.name == tenant)
    ).scalar_one_or_none()


def _allocate(connection: Connection, tenant: TenantName, last: int) -> str:
    if last >= ACCOUNT_ID_LAST:
        raise ConflictError(f"all account ids up to {ACCOUNT_ID_LAST} are given; use a new ledger")
    set_counter(connection, "account_id", last + 1)
    account_id = str(last + 1)
    connection.execute(
        schema.tenant.insert().values(name=tenant, account_id=account_id, created_us=now_us())
    )
    return account_id


def register_session(connection: Connection, request: RegisterSession) -> None:
    """Remember what a session is called, for usage and explanations.

    The rank is as at creation (a loaded state may change it), so a repeat need not agree on it.
    Raises ConflictError naming the field that disagrees with what is recorded.
    """
    for field in ("uid", "tenant", "name", "model"):
        checks.text(field, getattr(request, field))
    checks.text("project", request.project, empty=True)
    checks.quantity("rank", request.rank)
    checks.quantity("created_us", request.created_us)
    facts = msgspec.structs.asdict(request)
    book = facts.pop("price_book")
    if not insert_or_skip(connection, schema.session, **facts):
        _check_identity(connection, request)
    if book is not None:
        _fix_price_book(connection, request.uid, checks.text("price_book", book))


def _check_identity(connection: Connection, request: RegisterSession) -> None:
    row = connection.execute(
        select(schema.session).where(schema.session.c.uid == request.uid)
    ).one()
    for field in SESSION_IDENTITY:
        recorded, sent = getattr(row, field), getattr(request, field)
        if recorded != sent:
            raise ConflictError(
                f"session {request.uid} is registered with {field} {recorded!r}, not {sent!r}; "
                "a session keeps its identity: use another uid"
            )


def _fix_price_book(connection: Connection, uid: str, book: str) -> None:
    if insert_or_skip(
        connection, schema.session_price_book, session=uid, book=book, since_us=now_us()
    ):
        return
    recorded = session_book(connection, uid)
    if recorded != book:
        raise ConflictError(
            f"session {uid} is priced by book {recorded!r}, not {book!r}; prices stay as they were at "
            "its first start: use another session"
        )


def session_book(connection: Connection, uid: str) -> str | None:
    """Name of the price book of a session; None = the ledger's default."""
    table = schema.session_price_book.c
    return connection.execute(select(table.book).where(table.session == uid)).scalar_one_or_none()


def session_books(connection: Connection, uids: set[str]) -> dict[str, str]:
    """Price books of those sessions that have one of their own."""
    table = schema.session_price_book.c
    rows = connection.execute(select(table.session, table.book).where(table.session.in_(uids)))
    return {row.session: row.book for row in rows}


def is_registered(connection: Connection, uid: str) -> bool:
    """Whether somebody has registered the session, other than by its log."""
    table = schema.session.c
    found = connection.execute(select(table.uid).where(table.uid == uid)).scalar_one_or_none()
    return found is not None


def session_tenant(connection: Connection, uid: str) -> str | None:
    """The tenant of a session: as it was registered, else as its log was."""
    session, producer = schema.session.c, schema.producer.c
    tenant: str | None = connection.execute(
        select(session.tenant).where(session.uid == uid)
    ).scalar_one_or_none()
    if tenant is None:
        tenant = connection.execute(
            select(producer.tenant).where(producer.producer == uid)
        ).scalar_one_or_none()
    return tenant


def session_names(connection: Connection, uids: set[str]) -> dict[str, str]:
    """Display names of those sessions that are registered."""
    table = schema.session.c
    rows = connection.execute(select(table.uid, table.name).where(table.uid.in_(uids)))
    return {row.uid: row.name for row in rows}


def require_found(found: Found | None, subject: str) -> Found:
    """`found`, or NotFoundError saying that there is no such `subject`."""
    if found is None:
        raise NotFoundError(f"there is no {subject}; check the name, or list what there is")
    return found
