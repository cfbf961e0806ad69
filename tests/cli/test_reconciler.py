"""A session's whole life on real files and a real store; ledger and meter are played by the test."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gristmill_cli.local.actions import Hands, read_seats
from gristmill_cli.local.layout import GroupKey, Layout, make_folders
from gristmill_cli.local.reconciler import Reconciler
from gristmill_cli.local.world import World
from gristmill_contracts import conditions, labels
from gristmill_contracts.budgets import BudgetView, PutBudget, ScopeType
from gristmill_contracts.credentials import EndpointSecret
from gristmill_contracts.errors import ConflictError, NotFoundError, UnavailableError
from gristmill_contracts.http import RegisterSession, TenantAccount
from gristmill_contracts.ids import SessionUid, TenantName
from gristmill_contracts.price_book import PriceBook
from gristmill_contracts.rate_card import RateCard
from gristmill_contracts.resources import Metadata, NameRef
from gristmill_contracts.session import (
    BaseModelRef,
    BudgetSpec,
    TrainingSession,
    TrainingSessionSpec,
)
from gristmill_contracts.tenant import Tenant, TenantBudget, TenantSpec
from gristmill_contracts.usage import TOKEN_TYPES
from gristmill_sessions.identity import session_seed, session_uid
from gristmill_sessions.local import LocalStore, open_local_store
from gristmill_sessions.observed import Drain, Place, RemoveFiles, Seat, Withdraw
from gristmill_testing.budget_views import view_of
from gristmill_testing.worlds import beat

KEY = GroupKey("acme", "tiny")
ENDPOINT = "http://127.0.0.1:4711"


@dataclass(slots=True)
class FakeLedger:
    """Remembers registrations; `error` is raised instead of an answer."""

    registered: list[RegisterSession] = field(default_factory=list)
    books: list[PriceBook] = field(default_factory=list)
    error: Exception | None = None
    budgets: dict[tuple[str, str], PutBudget] = field(default_factory=dict)

    async def put_budget(self, tenant: str, name: str, budget: PutBudget) -> BudgetView:
        self.budgets[tenant, name] = budget
        return view_of(tenant, name, budget)

    async def list_budgets(
        self, tenant: str, scope_type: ScopeType, scope: str
    ) -> list[BudgetView]:
        return [
            view_of(*key, put)
            for key, put in self.budgets.items()
            if (key[0], put.scope_type, put.scope) == (tenant, scope_type, scope)
        ]

    async def end_budget(self, tenant: str, name: str) -> None:
        del self.budgets[tenant, name]

    async def put_tenant(self, tenant: str) -> TenantAccount:
        if self.error is not None:
            raise self.error
        return TenantAccount(tenant=TenantName(tenant), account_id="100000000001")

    async def put_price_book(self, book: PriceBook) -> None:
        self.books.append(book)

    async def register_session(self, session: RegisterSession) -> None:
        if self.error is not None:
            raise self.error
        self.registered.append(session)


@dataclass(slots=True)
class Machine:
    layout: Layout
    store: LocalStore
    ledger: FakeLedger
    world: World
    reconciler: Reconciler

    @property
    def session(self) -> TrainingSession:
        return self.store.get(TrainingSession, "acme", "run-1")

    @property
    def uid(self) -> SessionUid:
        return session_uid(self.session)

    async def look(self, models: tuple[str, ...] = ("tiny",)) -> float | None:
        return await self.reconciler.reconcile(self.session, models, ())

    def assignment(self) -> dict[str, Any]:
        path = self.layout.assignments(KEY) / f"{self.uid}.json"
        return dict(json.loads(path.read_bytes()))

    def meter_says(self, state: str, **fields: Any) -> None:
        heartbeat = beat(state, **fields)
        heartbeat.view.uid = self.uid
        self.world.take_heartbeats([heartbeat])

    def wish(self, change: Callable[[TrainingSessionSpec], TrainingSessionSpec]) -> None:
        session = self.session
        self.store.update(session.model_copy(update={"spec": change(session.spec)}))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    layout = Layout(tmp_path / "data")
    make_folders(layout)
    store, ledger, world = open_local_store(layout.store), FakeLedger(), World()
    hands = Hands(
        layout=layout, store=store, ledger=ledger, world=world, endpoint=lambda _: ENDPOINT
    )
    store.create(
        TrainingSession(
            metadata=Metadata(name="run-1", namespace="acme"),
            spec=TrainingSessionSpec(
                display_name="Run-1", project="p", base_model_ref=BaseModelRef(name="tiny")
            ),
        )
    )
    return Machine(layout, store, ledger, world, Reconciler(hands=hands))


async def test_one_look_brings_a_session_to_its_meter(machine: Machine) -> None:
    assert await machine.look() is None
    session = machine.session
    assert session.status.state == "Scheduled"
    assert session.metadata.finalizers == [labels.METERING_FLUSH]
    registered = machine.ledger.registered[0]
    assert (registered.uid, registered.name, registered.project) == (machine.uid, "Run-1", "p")
    secret = machine.store.get(EndpointSecret, "acme", "run-1").spec
    assignment = machine.assignment()
    assert assignment["secret"] == secret.secret
    assert (secret.session_uid, secret.attempt, secret.endpoint) == (machine.uid, 1, ENDPOINT)
    assert (assignment["name"], assignment["desired"]) == ("Run-1", "serve")
    assert assignment["seed"] == session_seed(machine.uid)


async def test_looking_again_changes_nothing(machine: Machine) -> None:
    await machine.look()
    revision, assignment = machine.store.revision(), machine.assignment()
    await machine.look()
    assert (machine.store.revision(), machine.assignment()) == (revision, assignment)


async def test_its_endpoint_is_shown_once_the_meter_speaks(machine: Machine) -> None:
    await machine.look()
    assert machine.session.status.endpoint == ""
    machine.meter_says("Recovering", worker_ready=False)
    await machine.look()
    assert (machine.session.status.endpoint, machine.session.status.state) == (
        ENDPOINT,
        "Scheduled",
    )
    machine.meter_says("Serving")
    await machine.look()
    assert machine.session.status.state == "Running"


async def test_a_stop_goes_through_the_meter(machine: Machine) -> None:
    await machine.look()
    machine.meter_says("Serving")
    machine.wish(lambda spec: spec.model_copy(update={"desired_state": "Stopped"}))
    await machine.look()
    assert (machine.assignment()["desired"], machine.session.status.state) == ("stop", "Stopping")
    machine.meter_says("Closed", acked=3, head=3)
    await machine.look()
    assert machine.session.status.state == "Stopped"
    assert machine.store.get(EndpointSecret, "acme", "run-1"), "results stay fetchable"


async def test_a_deleted_session_leaves_nothing(machine: Machine) -> None:
    await machine.look()
    machine.meter_says("Serving")
    uid = machine.uid
    log, state = machine.layout.meter(KEY) / uid, machine.layout.worker(KEY) / uid
    for folder in (log, state):
        folder.mkdir()
        (folder / "f").write_text("x")
    machine.store.delete(TrainingSession, "acme", "run-1")
    await machine.look()
    assert machine.session.status.state == "Deleting"
    machine.meter_says("Closed", acked=3, head=3)
    await machine.look()
    with pytest.raises(NotFoundError):
        machine.store.get(TrainingSession, "acme", "run-1")
    with pytest.raises(NotFoundError):
        machine.store.get(EndpointSecret, "acme", "run-1")
    assert not log.exists()
    assert not state.exists()
    assert list(machine.layout.assignments(KEY).iterdir()) == []
    assert uid not in machine.world.seats


async def test_a_log_that_was_not_posted_is_kept_aside(machine: Machine) -> None:
    await machine.look()
    log = machine.layout.meter(KEY) / machine.uid
    log.mkdir()
    (log / "f").write_text("usage")
    hands = machine.reconciler.hands
    for _ in range(2):
        await hands.do(machine.session, Withdraw())
        await hands.do(machine.session, RemoveFiles(flushed=False))
    assert (machine.layout.unflushed / machine.uid / "f").read_text() == "usage"
    assert not log.exists()


async def test_while_the_ledger_is_away_nothing_starts(machine: Machine) -> None:
    machine.ledger.error = UnavailableError("the ledger is away")
    assert await machine.look() == 0.5
    await machine.look()
    session = machine.session
    assert session.status.state == "Created"
    registered = conditions.find(session.status.conditions, conditions.LEDGER_REGISTERED)
    assert registered is not None
    assert (registered.reason, registered.message) == ("RegistrationFailed", "the ledger is away")
    machine.ledger.error = None
    await machine.look()
    assert machine.session.status.state == "Scheduled"


async def test_a_refused_registration_is_shown_and_is_no_endless_loop(machine: Machine) -> None:
    machine.ledger.error = ConflictError("it is registered with model 'other'")
    assert await machine.look() == 0.5
    assert await machine.look() == 0.5
    registered = conditions.find(machine.session.status.conditions, conditions.LEDGER_REGISTERED)
    assert registered is not None
    assert "it is registered with model 'other'" in registered.message


async def test_a_missing_model_is_named(machine: Machine) -> None:
    await machine.look(models=())
    accepted = conditions.find(machine.session.status.conditions, conditions.ACCEPTED)
    assert accepted is not None
    assert "gristmill models add tiny" in accepted.message
    await machine.look()
    assert machine.session.status.state == "Scheduled"


async def test_a_new_session_of_an_old_name_gets_a_secret_of_its_own(machine: Machine) -> None:
    await machine.look()
    old = machine.store.get(EndpointSecret, "acme", "run-1").spec
    hands = machine.reconciler.hands
    session = machine.session
    meta = session.metadata.model_copy(update={"annotations": {labels.SESSION_ID: "other"}})
    await hands.do(session.model_copy(update={"metadata": meta}), Place(1))
    new = machine.store.get(EndpointSecret, "acme", "run-1").spec
    assert new.session_uid == "other"
    assert new.secret != old.secret


async def test_placing_again_keeps_the_secret(machine: Machine) -> None:
    await machine.look()
    before = machine.assignment()
    await machine.reconciler.hands.do(machine.session, Place(1))
    assert machine.assignment() == before
    await machine.reconciler.hands.do(machine.session, Place(2))
    assert machine.assignment()["secret"] != before["secret"]


async def test_seats_are_found_again_after_a_restart(machine: Machine) -> None:
    await machine.look()
    sessions = machine.store.list(TrainingSession)

    def seats() -> Any:
        return read_seats(machine.layout, sessions, lambda _: ENDPOINT)

    assert seats() == machine.world.seats
    await machine.reconciler.hands.do(machine.session, Drain())
    assert seats()[machine.uid].stopping
    (machine.layout.assignments(KEY) / f"{machine.uid}.json").write_text("{")
    assert seats() == {}


async def test_a_change_by_somebody_else_is_met_by_looking_again(machine: Machine) -> None:
    stale = machine.session
    machine.wish(lambda spec: spec.model_copy(update={"ttl_seconds_after_finished": 5}))
    assert await machine.reconciler.reconcile(stale, ("tiny",), ()) == 0.0
    assert await machine.look() is None
    machine.store.update(
        machine.session.model_copy(
            update={"metadata": machine.session.metadata.model_copy(update={"finalizers": []})}
        )
    )
    gone = machine.session
    machine.store.delete(TrainingSession, "acme", "run-1")
    assert await machine.reconciler.reconcile(gone, ("tiny",), ()) is None


async def test_an_action_that_fails_is_tried_again_and_told(machine: Machine) -> None:
    groups = machine.layout.root / "groups"
    groups.write_text("in the way")
    assert await machine.look() == 0.5
    await machine.look()
    pods = conditions.find(machine.session.status.conditions, conditions.PODS_READY)
    assert pods is not None
    assert pods.reason == "StartFailed"
    assert "groups" in pods.message
    groups.unlink()
    await machine.look()
    assert machine.world.seats[machine.uid] == Seat(attempt=1, endpoint=ENDPOINT, stopping=False)


def rate_card(name: str) -> RateCard:
    prices = [{"model": "*", "meter": meter, "price": "0.25"} for meter in TOKEN_TYPES]
    spec = {"currency": "EUR", "prices": prices, "effectiveFrom": "2026-01-01T00:00:00Z"}
    return RateCard.model_validate({"metadata": {"name": name}, "spec": spec})


async def test_a_session_is_registered_with_its_tenants_prices(machine: Machine) -> None:
    machine.store.create(rate_card("standard"))
    tenant = {"metadata": {"name": "acme"}, "spec": {"rateCardRef": {"name": "standard"}}}
    machine.store.create(Tenant.model_validate(tenant))
    await machine.look()
    assert machine.ledger.registered[0].price_book == "standard"
    book = machine.ledger.books[0]
    assert (book.name, book.currency) == ("standard", "EUR")
    assert {each.micros_per_mtok for each in book.prices} == {250_000}


async def test_a_session_without_a_card_has_the_ledgers_own_prices(machine: Machine) -> None:
    await machine.look()
    assert machine.ledger.registered[0].price_book is None
    assert machine.ledger.books == []


async def test_a_missing_rate_card_is_said_and_looked_for_again(machine: Machine) -> None:
    machine.wish(lambda spec: spec.model_copy(update={"rate_card_ref": NameRef(name="gone")}))
    assert await machine.look() is not None
    assert machine.ledger.registered == []
    assert "rate card 'gone' does not exist" in machine.world.errors[machine.uid]
    machine.store.create(rate_card("gone"))
    await machine.look()
    assert machine.ledger.registered[0].price_book == "gone"


async def test_the_budget_of_a_session_is_told_before_it_starts_and_when_it_changes(
    machine: Machine,
) -> None:
    machine.wish(lambda spec: spec.model_copy(update={"budget": BudgetSpec(max_tokens=5)}))
    machine.ledger.error = UnavailableError("away")
    await machine.look()
    assert machine.uid not in machine.world.registered
    machine.ledger.error = None
    await machine.look()
    name = f"session-{machine.uid}.tokens"
    assert machine.ledger.budgets["acme", name].limit == 5
    hands = machine.reconciler.hands
    machine.wish(lambda spec: spec.model_copy(update={"budget": BudgetSpec(max_tokens=9)}))
    await hands.keep_budgets(machine.session)
    assert machine.ledger.budgets["acme", name].limit == 9
    machine.wish(lambda spec: spec.model_copy(update={"budget": BudgetSpec(max_cost="1.5")}))
    await hands.keep_budgets(machine.session)
    (key,) = machine.ledger.budgets
    assert key == ("acme", f"session-{machine.uid}.USD")
    assert machine.ledger.budgets[key].limit == 1_500_000_000_000
    machine.wish(lambda spec: spec.model_copy(update={"budget": None}))
    await hands.keep_budgets(machine.session)
    assert machine.ledger.budgets == {}


async def test_the_budget_of_a_tenant_is_told(machine: Machine) -> None:
    budget = TenantBudget(hard="2.5", soft_percent=90)
    tenant = Tenant(metadata=Metadata(name="acme", namespace=""), spec=TenantSpec(budget=budget))
    await machine.reconciler.hands.budgets.keep_tenants([tenant])
    put = machine.ledger.budgets["acme", "tenant.USD"]
    assert (put.limit, put.thresholds, put.source) == (2_500_000_000_000, (90, 100), "resource")


async def test_a_ledger_that_is_away_is_said_once_of_each_tenant(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = [Tenant(metadata=Metadata(name=name, namespace="")) for name in ("acme", "other")]
    keeper = machine.reconciler.hands.budgets

    async def away(*_asked: object) -> list[BudgetView]:
        raise UnavailableError("the ledger does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(FakeLedger, "list_budgets", away)
        for _ in range(3):
            await keeper.keep_tenants(tenants)
    assert [record.message for record in caplog.records] == ["budget_not_told"] * 2
    # What went well ends it: the next time is said again.
    await keeper.keep_tenants(tenants)
    keeper.told.clear()
    with monkeypatch.context() as patched:
        patched.setattr(FakeLedger, "list_budgets", away)
        await keeper.keep_tenants(tenants)
    assert len(caplog.records) == 4
