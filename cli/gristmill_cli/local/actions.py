"""Carries out the planner's actions on one machine: files, the resource store, the ledger."""

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from gristmill_cli.errors import CommandError
from gristmill_cli.local.budgets import BudgetKeeper
from gristmill_cli.local.layout import (
    GroupKey,
    Layout,
    make_group_folders,
    write_private,
)
from gristmill_cli.local.world import World, group_of
from gristmill_contracts import labels
from gristmill_contracts.credentials import EndpointSecret, EndpointSecretSpec
from gristmill_contracts.errors import ConflictError, NotFoundError
from gristmill_contracts.http import Assignment, RegisterSession, TenantAccount
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.price_book import PriceBook
from gristmill_contracts.rate_card import RateCard, price_book
from gristmill_contracts.resources import Metadata
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.tenant import Tenant
from gristmill_sessions import observed as planned
from gristmill_sessions.budgets import BudgetLedger
from gristmill_sessions.identity import session_name, session_seed, session_uid
from gristmill_sessions.observed import Action, Seat
from gristmill_sessions.port import ResourceStore


class Registrar(BudgetLedger, Protocol):
    """What a session must be told to before it starts: the ledger."""

    async def put_tenant(self, tenant: str) -> TenantAccount: ...

    async def put_price_book(self, book: PriceBook) -> None: ...

    async def register_session(self, session: RegisterSession) -> None: ...


@dataclass(slots=True, kw_only=True)
class Hands:
    """`do` an action. Every action may be done again: it ends in the same state."""

    layout: Layout
    store: ResourceStore
    ledger: Registrar
    world: World
    endpoint: Callable[[GroupKey], str]
    """Where the meter of a group listens."""
    budgets: BudgetKeeper = field(init=False)

    def __post_init__(self) -> None:
        self.budgets = BudgetKeeper(self.ledger)

    async def keep_budgets(self, session: TrainingSession) -> None:
        """A budget may change at any time: tell the ledger if it did. Raises nothing."""
        if session_uid(session) not in self.world.registered:
            return
        try:
            card = await asyncio.to_thread(self._rate_card, session)
        except CommandError:
            card = None
        await self.budgets.keep_session(session, currency_of(card))

    async def do(self, session: TrainingSession, action: Action) -> None:
        match action:
            case planned.Register():
                await self._register(session)
            case planned.Adopt():
                await asyncio.to_thread(self._adopt, session)
            case planned.Place(attempt=attempt):
                await asyncio.to_thread(self._place, session, attempt)
            case planned.Drain():
                await asyncio.to_thread(self._drain, session)
            case planned.Withdraw():
                await asyncio.to_thread(self._withdraw, session)
            case planned.RemoveFiles(flushed=flushed):
                await asyncio.to_thread(self._remove_files, session, flushed)
            case planned.Release():
                await asyncio.to_thread(self._release, session)
            case planned.DeleteSession():
                meta = session.metadata
                await asyncio.to_thread(
                    self.store.delete, TrainingSession, meta.namespace, meta.name
                )

    # --- coming to life --------------------------------------------------------------------------

    async def _register(self, session: TrainingSession) -> None:
        uid = session_uid(session)
        card = await asyncio.to_thread(self._rate_card, session)
        request = RegisterSession(
            uid=uid,
            tenant=TenantName(session.metadata.namespace),
            project=session.spec.project,
            name=session_name(session),
            model=session.spec.base_model_ref.name,
            rank=session.spec.lora.rank,
            created_us=session.metadata.creation_time_us,
            price_book=None if card is None else card.metadata.name,
        )
        try:
            await self.ledger.put_tenant(session.metadata.namespace)
            if card is not None:
                await self.ledger.put_price_book(price_book(card))
            await self.ledger.register_session(request)
            await self.budgets.tell_session(session, currency_of(card))
        except ConflictError as error:
            # Not a stale resource: trying again would not help.
            raise CommandError(f"the ledger refuses the session: {error.message}") from error
        self.world.registered.add(uid)

    def _rate_card(self, session: TrainingSession) -> RateCard | None:
        """The session's, else its tenant's; None = the ledger's own prices. Raises CommandError if it is missing."""
        named = session.spec.rate_card_ref
        if named is None:
            with contextlib.suppress(NotFoundError):
                named = self.store.get(Tenant, "", session.metadata.namespace).spec.rate_card_ref
        if named is None:
            return None
        try:
            return self.store.get(RateCard, "", named.name)
        except NotFoundError as error:
            raise CommandError(
                f"rate card {named.name!r} does not exist; apply it with `gristmill apply`"
            ) from error

    def _adopt(self, session: TrainingSession) -> None:
        meta = session.metadata
        finalizers = [*(f for f in meta.finalizers if f != labels.METERING_FLUSH)]
        changed = meta.model_copy(
            update={
                "finalizers": [*finalizers, labels.METERING_FLUSH],
                "annotations": {labels.SESSION_ID: meta.uid, **meta.annotations},
            }
        )
        self.store.update(session.model_copy(update={"metadata": changed}))

    def _place(self, session: TrainingSession, attempt: int) -> None:
        key, uid = group_of(session), session_uid(session)
        make_group_folders(self.layout, key)
        endpoint = self.endpoint(key)
        secret = self._ensure_secret(session, uid, attempt, endpoint)
        assignment = build_assignment(session, attempt, secret, stop=False)
        self._write(key, assignment)
        self.world.seats[uid] = Seat(attempt=attempt, endpoint=endpoint, stopping=False)

    def _ensure_secret(
        self, session: TrainingSession, uid: SessionUid, attempt: int, endpoint: str
    ) -> str:
        """The secret of this attempt: the one that is there, else a new one."""
        meta = session.metadata
        with contextlib.suppress(NotFoundError):
            known = self.store.get(EndpointSecret, meta.namespace, meta.name)
            fits = (known.spec.session_uid, known.spec.attempt) == (uid, attempt)
            if fits and known.spec.endpoint == endpoint:
                return known.spec.secret
            self.store.delete(EndpointSecret, meta.namespace, meta.name)
        secret = secrets.token_urlsafe(32)
        self.store.create(
            EndpointSecret(
                metadata=Metadata(name=meta.name, namespace=meta.namespace),
                spec=EndpointSecretSpec(
                    session_uid=uid, attempt=attempt, endpoint=endpoint, secret=secret
                ),
            )
        )
        return secret

    # --- coming to an end ------------------------------------------------------------------------

    def _drain(self, session: TrainingSession) -> None:
        uid, key = session_uid(session), group_of(session)
        seat = self.world.seats[uid]
        path = self._path(key, uid)
        assignment = msgspec.json.decode(path.read_bytes(), type=Assignment)
        self._write(key, msgspec.structs.replace(assignment, desired="stop"))
        self.world.seats[uid] = Seat(attempt=seat.attempt, endpoint=seat.endpoint, stopping=True)

    def _withdraw(self, session: TrainingSession) -> None:
        meta = session.metadata
        self._path(group_of(session), session_uid(session)).unlink(missing_ok=True)
        with contextlib.suppress(NotFoundError):
            self.store.delete(EndpointSecret, meta.namespace, meta.name)
        self.world.seats.pop(session_uid(session), None)

    def _remove_files(self, session: TrainingSession, flushed: bool) -> None:
        uid, key = session_uid(session), group_of(session)
        log = self.layout.meter(key) / uid
        if log.exists() and not flushed:
            self.layout.unflushed.mkdir(mode=0o700, exist_ok=True)
            log.rename(self.layout.unflushed / uid)
        for folder in (log, self.layout.worker(key) / uid):
            if folder.exists():
                shutil.rmtree(folder)

    def _release(self, session: TrainingSession) -> None:
        meta = session.metadata
        left = [each for each in meta.finalizers if each != labels.METERING_FLUSH]
        changed = meta.model_copy(update={"finalizers": left})
        self.store.update(session.model_copy(update={"metadata": changed}))
        self.world.forget(session_uid(session))

    # --- files -----------------------------------------------------------------------------------

    def _path(self, key: GroupKey, uid: str) -> Path:
        return self.layout.assignments(key) / f"{uid}.json"

    def _write(self, key: GroupKey, assignment: Assignment) -> None:
        text = msgspec.json.format(msgspec.json.encode(assignment), indent=2)
        write_private(self._path(key, assignment.uid), text)


def build_assignment(
    session: TrainingSession, attempt: int, secret: str, *, stop: bool
) -> Assignment:
    uid, spec = session_uid(session), session.spec
    return Assignment(
        uid=uid,
        tenant=TenantName(session.metadata.namespace),
        project=spec.project,
        name=session_name(session),
        model=spec.base_model_ref.name,
        attempt=attempt,
        secret=secret,
        rank=spec.lora.rank,
        alpha=spec.lora.alpha,
        seed=session_seed(uid),
        checkpoint_group=spec.output.checkpoint_group,
        desired="stop" if stop else "serve",
    )


def read_seats(
    layout: Layout, sessions: list[TrainingSession], endpoint: Callable[[GroupKey], str]
) -> dict[SessionUid, Seat]:
    """The seats that an earlier instance left: the assignment files are the truth of them."""
    seats: dict[SessionUid, Seat] = {}
    for session in sessions:
        key, uid = group_of(session), session_uid(session)
        path = layout.assignments(key) / f"{uid}.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Assignment)
        except (FileNotFoundError, msgspec.DecodeError):
            continue
        seats[uid] = Seat(
            attempt=found.attempt, endpoint=endpoint(key), stopping=found.desired == "stop"
        )
    return seats


def currency_of(card: RateCard | None) -> str | None:
    return None if card is None else card.spec.currency
