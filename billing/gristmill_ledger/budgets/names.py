"""Whether what a budget names was ever heard of. It may be made before that, and it may be misspelt."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from sqlalchemy import Connection, Row, Select, select, union

from gristmill_ledger import schema
from gristmill_ledger.lists import among

AnyRow = Row[*tuple[Any, ...]]
UnheardOf = Literal["tenant", "project", "session"]

_tenant, _head = schema.tenant.c, schema.tenant_head.c
_session, _producer = schema.session.c, schema.producer.c
_TENANTS: Final = union(
    select(_tenant.name).where(among(_tenant.name, "names")),
    select(_head.tenant).where(among(_head.tenant, "names")),
)
_TENANTS_OF_SESSIONS: Final = (
    select(_session.tenant).where(among(_session.tenant, "names")).distinct()
)
_SCOPES: Final[dict[UnheardOf, tuple[Select[str, str], ...]]] = {
    "project": (
        select(_session.tenant, _session.project)
        .where(among(_session.project, "scopes"))
        .distinct(),
    ),
    "session": (
        select(_session.tenant, _session.uid).where(among(_session.uid, "scopes")),
        select(_producer.tenant, _producer.producer).where(among(_producer.producer, "scopes")),
    ),
}


def find_unheard_of(connection: Connection, budgets: Sequence[AnyRow]) -> dict[str, UnheardOf]:
    """Of budgets (rows with id, tenant, scope_type and scope): what each names that nobody has told the ledger of."""
    names = {row.tenant for row in budgets}
    known = set(connection.execute(_TENANTS, {"names": sorted(names)}).scalars())
    if names - known:
        # Without an index, and so only for those that may be misspelt.
        missing = {"names": sorted(names - known)}
        known |= set(connection.execute(_TENANTS_OF_SESSIONS, missing).scalars())
    found: dict[str, UnheardOf] = {row.id: "tenant" for row in budgets if row.tenant not in known}
    for kind, statements in _SCOPES.items():
        mine = [row for row in budgets if row.scope_type == kind and row.id not in found]
        heard: set[tuple[str, str]] = set()
        for statement in statements if mine else ():
            named = {"scopes": sorted({row.scope for row in mine})}
            heard |= {(tenant, scope) for tenant, scope in connection.execute(statement, named)}
        found |= {row.id: kind for row in mine if (row.tenant, row.scope) not in heard}
    return found
