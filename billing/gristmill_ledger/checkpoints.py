"""The checkpoint registry: groups, gapless versions in each, tombstones instead of deletion."""

import base64
import binascii
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, Select, literal, select, tuple_

from gristmill_contracts import limits
from gristmill_contracts.errors import ConflictError, FencedError, InvalidRequestError
from gristmill_contracts.http import (
    Checkpoint,
    CheckpointGroup,
    CheckpointPage,
    CreateGroup,
    RegisterCheckpoint,
)  # fmt: skip
from gristmill_contracts.units import now_us
from gristmill_ledger import checks, schema
from gristmill_ledger.database import insert_or_skip
from gristmill_ledger.producers import owning_attempt
from gristmill_ledger.registry import require_found, session_tenant

Order = Literal["asc", "desc"]


def create_group(connection: Connection, request: CreateGroup) -> CheckpointGroup:
    """Make a group. Raises ConflictError if there is one of that name."""
    checks.text("tenant", request.tenant)
    checks.text("name", request.name)
    checks.text("description", request.description, empty=True)
    group = CheckpointGroup(
        tenant=request.tenant,
        name=request.name,
        description=request.description,
        created_us=now_us(),
    )
    if not insert_or_skip(connection, schema.checkpoint_group, **msgspec.structs.asdict(group)):
        raise ConflictError(
            f"checkpoint group {request.name!r} of {request.tenant} exists; use it, or another name"
        )
    return group


def get_group(connection: Connection, tenant: str, name: str) -> CheckpointGroup:
    """Raises NotFoundError."""
    table = schema.checkpoint_group
    row = connection.execute(
        select(table).where(table.c.tenant == tenant, table.c.name == name)
    ).one_or_none()
    row = require_found(row, f"checkpoint group {name!r} of {tenant}")
    return CheckpointGroup(**row._mapping)


def register_checkpoint(
    connection: Connection, request: RegisterCheckpoint, *, attempt: int | None = None
) -> Checkpoint:
    """Give a checkpoint the next version of its group; the same one again keeps its version.

    attempt: of the meter that asks; None = not told. A group that does not exist is made. Raises
    ConflictError if the id is taken by other facts, or the session is another tenant's, FencedError for
    an attempt that a newer one has replaced: its save has not been released, and never will be.
    """
    _check_registration(request)
    _check_owner(connection, request, attempt)
    known = _find(connection, request.id)
    if known is None:
        _lock_group(connection, request)
        # Whoever held the lock before may have registered the same checkpoint.
        known = _find(connection, request.id)
    if known is not None:
        return _same(known, request)
    table = schema.checkpoint
    last = connection.execute(
        select(table.c.version)
        .where(table.c.tenant == request.tenant, table.c.group_name == request.group)
        .order_by(table.c.version.desc())
        .limit(1)
    ).scalar_one_or_none()
    facts = msgspec.structs.asdict(request)
    made = Checkpoint(**facts, version=(last or 0) + 1)
    facts["group_name"] = facts.pop("group")
    connection.execute(table.insert().values(**facts, version=made.version))
    return made


def _check_registration(request: RegisterCheckpoint) -> None:
    for field in ("id", "tenant", "session", "group", "path", "model", "manifest_sha256"):
        checks.text(field, getattr(request, field))
    checks.text("description", request.description, empty=True)
    for field in ("rank", "alpha", "size_bytes", "created_us"):
        checks.quantity(field, getattr(request, field))


def _check_owner(connection: Connection, request: RegisterCheckpoint, attempt: int | None) -> None:
    tenant = session_tenant(connection, request.session)
    if tenant is not None and tenant != request.tenant:
        raise ConflictError(
            f"session {request.session} belongs to tenant {tenant}, not {request.tenant}"
        )
    owner = owning_attempt(connection, request.session)
    if attempt is not None and owner is not None and attempt < owner:
        raise FencedError(
            f"attempt {attempt} of session {request.session} saves a checkpoint, but attempt {owner} "
            "owns the session; stop"
        )


def _lock_group(connection: Connection, request: RegisterCheckpoint) -> None:
    table = schema.checkpoint_group
    insert_or_skip(
        connection,
        table,
        tenant=request.tenant,
        name=request.group,
        description="",
        created_us=now_us(),
    )
    connection.execute(
        select(table.c.name)
        .where(table.c.tenant == request.tenant, table.c.name == request.group)
        .with_for_update()
    )


def _same(known: Checkpoint, request: RegisterCheckpoint) -> Checkpoint:
    for field in request.__struct_fields__:
        recorded, sent = getattr(known, field), getattr(request, field)
        if recorded != sent:
            raise ConflictError(
                f"checkpoint {request.id} is registered with {field} {recorded!r}, not {sent!r}; "
                "a checkpoint never changes: save another one"
            )
    return known


def _find(connection: Connection, checkpoint_id: str) -> Checkpoint | None:
    row = connection.execute(
        _listing().where(schema.checkpoint.c.id == checkpoint_id)
    ).one_or_none()
    return None if row is None else _checkpoint(row)


def holds_path(connection: Connection, path: str) -> bool:
    """Whether a file belongs to a registered checkpoint. `path` begins with the tenant's name."""
    names = path.split("/")[:-1]
    folders = ["/".join(names[:end]) for end in range(1, len(names) + 1)]
    table = schema.checkpoint.c
    # A checkpoint's folder is called by its id: the key finds it without an index of paths.
    found = connection.execute(
        select(table.id).where(table.id.in_(names), table.path.in_(folders)).limit(1)
    ).scalar_one_or_none()
    return found is not None


def get_checkpoint(connection: Connection, tenant: str, group: str, version: int) -> Checkpoint:
    """Raises NotFoundError if there is none, or it was deleted."""
    row = connection.execute(
        _listing().where(
            schema.checkpoint.c.tenant == tenant,
            schema.checkpoint.c.group_name == group,
            schema.checkpoint.c.version == version,
            schema.checkpoint_tombstone.c.id.is_(None),
        )
    ).one_or_none()
    return _checkpoint(require_found(row, f"checkpoint {tenant}/{group}/{version}"))


def delete_checkpoint(connection: Connection, tenant: str, group: str, version: int) -> None:
    """Put a tombstone on a checkpoint: its facts stay. Raises NotFoundError as `get` does."""
    found = get_checkpoint(connection, tenant, group, version)
    if not insert_or_skip(
        connection, schema.checkpoint_tombstone, id=found.id, deleted_us=now_us()
    ):
        require_found(None, f"checkpoint {tenant}/{group}/{version}")


def list_checkpoints(
    connection: Connection,
    *,
    tenant: str,
    group: str | None,
    after: str | None,
    limit: int,
    order: Order,
) -> CheckpointPage:
    """Checkpoints of a tenant by time of creation, without the deleted ones."""
    table = schema.checkpoint.c
    query = _listing().where(table.tenant == tenant, schema.checkpoint_tombstone.c.id.is_(None))
    if group is not None:
        query = query.where(table.group_name == group)
    key = tuple_(table.created_us, table.id)
    if after is not None:
        created_us, last_id = _parse_cursor(after)
        place = tuple_(literal(created_us, table.created_us.type), literal(last_id, table.id.type))
        query = query.where(key > place if order == "asc" else key < place)
    columns = [table.created_us, table.id]
    query = query.order_by(*(c.asc() if order == "asc" else c.desc() for c in columns))
    rows = [_checkpoint(row) for row in connection.execute(query.limit(limit + 1))]
    more = len(rows) > limit
    return CheckpointPage(
        checkpoints=rows[:limit], next_after=_cursor(rows[limit - 1]) if more else None
    )


def _listing() -> Select[*tuple[object, ...]]:
    return select(schema.checkpoint, schema.checkpoint_tombstone.c.deleted_us).select_from(
        schema.checkpoint.outerjoin(
            schema.checkpoint_tombstone,
            schema.checkpoint_tombstone.c.id == schema.checkpoint.c.id,
        )
    )


def _checkpoint(row: Row[*tuple[object, ...]]) -> Checkpoint:
    facts: dict[str, Any] = dict(row._mapping)  # Any: column values
    facts["group"] = facts.pop("group_name")
    facts["deleted"] = facts.pop("deleted_us") is not None
    return Checkpoint(**facts)


def _cursor(last: Checkpoint) -> str:
    place = msgspec.msgpack.encode((last.created_us, last.id))
    return base64.urlsafe_b64encode(place).decode()


def _parse_cursor(text: str) -> tuple[int, str]:
    if len(text) > limits.NEXT_TOKEN_CHARS_MAX:
        raise InvalidRequestError("after is too long; pass next_after of the page before")
    try:
        place = msgspec.msgpack.decode(
            base64.b64decode(text, altchars=b"-_", validate=True), type=tuple[int, str]
        )
    except (ValueError, binascii.Error) as error:
        raise InvalidRequestError(
            f"after {text!r} is no cursor; pass next_after of the page before"
        ) from error
    checks.signed("after", place[0])
    return place[0], checks.text("after", place[1])
