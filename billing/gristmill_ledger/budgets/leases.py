"""Taking leases: several at once in one transaction, for all of them may want the same few rows."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, select

from gristmill_contracts import limits
from gristmill_contracts.budgets import TOKENS, Hold, Lease, LeaseAnswer, TakeLease
from gristmill_contracts.errors import (
    ConflictError,
    FencedError,
    GristmillError,
    NotFoundError,
    OverloadedError,
)
from gristmill_ledger import schema
from gristmill_ledger.budgets.amounts import try_reserve
from gristmill_ledger.budgets.decide import Figures
from gristmill_ledger.budgets.figures import Scopes, applicable
from gristmill_ledger.budgets.granting import Asked, Decided, decide_all, denied, totals
from gristmill_ledger.budgets.holds import LEASE_US
from gristmill_ledger.budgets.open_leases import read_holds, seconds_left
from gristmill_ledger.driver import insert_all
from gristmill_ledger.lists import among
from gristmill_ledger.prices import PriceList, load_prices
from gristmill_ledger.schema import budgets as tables

LEASE_NAMESPACE: Final = uuid.UUID("6b1f3c60-5f0e-5a51-9a51-0d6f1e0d9c03")
TRIES_MAX: Final = 8
"""How often a batch is decided anew because another process took from the same budgets meanwhile."""

Answer = LeaseAnswer | GristmillError

_session, _producer = schema.session.c, schema.producer.c
_book, _version = schema.session_price_book.c, tables.budget_version.c
_SESSIONS: Final = (
    select(_session.uid, _session.tenant, _session.project, _producer.attempt, _book.book)
    .select_from(
        schema.session.outerjoin(schema.producer, _producer.producer == _session.uid).outerjoin(
            schema.session_price_book, _book.session == _session.uid
        )
    )
    .where(among(_session.uid, "uids"))
)
_KNOWN: Final = select(tables.budget_lease).where(among(tables.budget_lease.c.id, "ids"))
_VERSIONS: Final = select(_version.tenant, _version.version).where(
    among(_version.tenant, "tenants")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A session, as those who take leases for it see it."""

    tenant: str
    project: str
    attempt: int
    """The newest that registered a log; 0 = none."""
    book: str


def lease_id(session: str, attempt: int, seq: int) -> str:
    """A pure function of who asked, so that the same request sent again finds the same lease."""
    return str(uuid.uuid5(LEASE_NAMESPACE, f"{session}/{attempt}/{seq}"))


def take(
    connection: Connection, requests: Sequence[TakeLease], *, book: str, now_us: int
) -> list[Answer]:
    """Answer each request as if it came alone, in this order. The error of one does not touch the others.

    book: name of the price book of sessions that have none of their own.
    """
    sessions = _sessions(connection, {each.session for each in requests}, book)
    ids = [lease_id(each.session, each.attempt, each.seq) for each in requests]
    answers: dict[str, Answer] = _again(connection, requests, ids, now_us)
    fresh: dict[str, TakeLease] = {}
    for lease, request in zip(ids, requests, strict=True):
        error = _refused(request, sessions.get(request.session))
        if error is not None:
            answers[lease] = error
        elif lease not in answers:
            fresh.setdefault(lease, request)
    answers |= _take_fresh(connection, fresh, sessions, now_us)
    return [answers[lease] for lease in ids]


def _take_fresh(
    connection: Connection, fresh: dict[str, TakeLease], sessions: dict[str, Known], now_us: int
) -> dict[str, Answer]:
    versions = read_versions(connection, {sessions[each.session].tenant for each in fresh.values()})
    prices: dict[str, PriceList] = {}
    for _ in range(TRIES_MAX):
        figures = _figures(connection, fresh.values(), sessions, now_us)
        asked = [
            _asked(connection, lease, request, sessions[request.session], figures, prices)
            for lease, request in fresh.items()
        ]
        decided = decide_all(asked, figures, now_us)
        if try_reserve(connection, totals(decided)):
            _record(connection, [each for each in decided if each.grants], now_us)
            return {
                each.asked.lease: _answer(each, versions.get(each.asked.tenant, 0), now_us)
                for each in decided
            }
    message = "too many leases are taken from the same budgets at once; ask again"
    return dict.fromkeys(fresh, OverloadedError(message))


def _sessions(connection: Connection, uids: set[str], book: str) -> dict[str, Known]:
    return {
        row.uid: Known(
            tenant=row.tenant, project=row.project, attempt=row.attempt or 0, book=row.book or book
        )
        for row in connection.execute(_SESSIONS, {"uids": sorted(uids)})
    }


def _refused(request: TakeLease, known: Known | None) -> GristmillError | None:
    if known is None:
        return NotFoundError(
            f"session {request.session} is not registered; whoever starts its meter registers it first"
        )
    if request.attempt < known.attempt:
        return FencedError(
            f"attempt {request.attempt} of session {request.session} asks for a lease, but attempt "
            f"{known.attempt} owns the session; stop"
        )
    return None


def read_versions(connection: Connection, tenants: set[str]) -> dict[str, int]:
    """How often the budgets of each tenant changed; one that is missing has none."""
    rows = connection.execute(_VERSIONS, {"tenants": sorted(tenants)})
    return {row.tenant: row.version for row in rows}


def _figures(
    connection: Connection, requests: Any, sessions: dict[str, Known], now_us: int
) -> dict[str, list[Figures]]:  # Any: the values of a dict
    scopes: dict[str, Scopes] = {}
    for each in requests:
        known = sessions[each.session]
        scope = scopes.setdefault(known.tenant, Scopes(tenant=known.tenant))
        scope.projects.add(known.project)
        scope.sessions.add(each.session)
        scope.keys.add(each.key)
    return {tenant: applicable(connection, scopes[tenant], now_us) for tenant in sorted(scopes)}


def _asked(  # noqa: PLR0917
    connection: Connection,
    lease: str,
    request: TakeLease,
    known: Known,
    figures: dict[str, list[Figures]],
    prices: dict[str, PriceList],
) -> Asked:
    in_money = any(each.unit != TOKENS for each in figures[known.tenant])
    if in_money and known.book not in prices:
        prices[known.book] = load_prices(connection, known.book)
    return Asked(
        request=request,
        lease=lease,
        tenant=known.tenant,
        project=known.project,
        prices=prices[known.book] if in_money else None,
    )


def _record(connection: Connection, decided: list[Decided], now_us: int) -> None:
    if not decided:
        return
    leases: list[dict[str, object]] = []
    reservations: list[dict[str, object]] = []
    balances: list[dict[str, object]] = []
    for each in decided:
        request, lease = each.asked.request, each.asked.lease
        leases.append(
            {
                "id": lease,
                "tenant": each.asked.tenant,
                "session": request.session,
                "attempt": request.attempt,
                "seq": request.seq,
                "key": request.key,
                "model": request.model,
                "prices": msgspec.msgpack.encode(each.prices),
                "taken_us": now_us,
                "usable_until_us": each.usable_until_us,
            }
        )
        for figures, amount, floor in each.grants:
            hold = {"lease": lease, "budget": figures.budget, "start_us": figures.start_us}
            reservations.append(hold | {"amount": amount, "floor": floor})
            balances.append(
                hold
                | {"session": request.session, "attempt": request.attempt, "posted": 0, "rest": amount,
                   "expires_us": now_us + LEASE_US, "suspended": 0, "unknown_usage": 0}
            )  # fmt: skip
    insert_all(connection, tables.budget_lease, leases)
    insert_all(connection, tables.reservation, reservations)
    insert_all(connection, tables.reservation_balance, balances)


def _answer(decided: Decided, version: int, now_us: int) -> LeaseAnswer:
    if decided.refusal is not None:
        return denied(decided.refusal, decided.asked, version)
    holds = [
        Hold(
            budget=figures.budget,
            period_start_us=figures.start_us,
            unit=figures.unit,
            amount=amount,
            floor=floor,
            mode=figures.mode,
        )
        for figures, amount, floor in decided.grants
    ]
    expires_us = min(now_us + LEASE_US, decided.usable_until_us)
    return Lease(
        id=decided.asked.lease if holds else "",
        expires_in_s=(expires_us - now_us) / 1e6 if holds else limits.BUDGET_ASK_S,
        prices=decided.prices,
        holds=holds,
        version=version,
    )


def _again(
    connection: Connection, requests: Sequence[TakeLease], ids: list[str], now_us: int
) -> dict[str, Answer]:
    """Answers to requests that were granted before, by lease."""
    asked = dict(zip(ids, requests, strict=True))
    known = connection.execute(_KNOWN, {"ids": sorted(asked)}).all()
    if not known:
        return {}
    found = read_holds(connection, [row.id for row in known])
    versions = read_versions(connection, {row.tenant for row in known})
    answers: dict[str, Answer] = {}
    for row in known:
        request = asked[row.id]
        if (row.key, row.model) != (request.key, request.model):
            answers[row.id] = ConflictError(
                f"lease {row.id} was taken for key {row.key!r} and model {row.model!r}, not "
                f"{request.key!r} and {request.model!r}; use another seq for another lease"
            )
            continue
        held = found[row.id]
        answers[row.id] = Lease(
            id=row.id,
            expires_in_s=seconds_left(min(held.expires_us, row.usable_until_us), now_us),
            prices=msgspec.msgpack.decode(row.prices, type=dict[str, int]),
            holds=held.holds,
            version=versions.get(row.tenant, 0),
        )
    return answers
