"""The loop over one session: order of things, errors, conflicts, and writes that are not made."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gristmill_contracts import conditions
from gristmill_contracts.errors import (
    ConflictError,
    GristmillError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.session import TrainingSession, UsageStatus
from gristmill_operator.budget import WriteBudget
from gristmill_operator.cache import ObjectCache
from gristmill_operator.cluster import CachedCluster
from gristmill_operator.expectations import Expectations
from gristmill_operator.kinds import PODS, SESSIONS
from gristmill_operator.problems import NotLeaderError
from gristmill_operator.queue import KeyQueue
from gristmill_operator.reconcile import NOT_UNDERSTOOD, SessionReconciler, StepFailedError
from gristmill_operator.seams import Key
from gristmill_operator.workers import Workers
from gristmill_sessions import observed as planned
from gristmill_sessions.observed import Action, Observed, Plan
from gristmill_testing.hand_clock import HandClock, settle
from gristmill_testing.small_api import SmallApi

KEY = Key("TrainingSession", "gm-a", "s")
Planner = Callable[[Observed], Plan]


@dataclass
class Eyes:
    errors: list[str] = field(default_factory=list)

    def observe(self, session: TrainingSession, *, error: str, now_us: int) -> Observed:
        self.errors.append(error)
        return Observed(session=session, now_us=now_us, error=error)


@dataclass
class Hand:
    done: list[Action] = field(default_factory=list)
    fail: Callable[[Action], Exception | None] = lambda action: None

    async def keep_budgets(self, session: TrainingSession) -> None:
        del session

    async def do(self, session: TrainingSession, action: Action) -> None:
        error = self.fail(action)
        if error is not None:
            raise error
        self.done.append(action)


@dataclass
class Told:
    events: list[str] = field(default_factory=list)

    def record(self, regarding: dict[str, Any], reason: str, note: str, **more: Any) -> None:
        self.events.append(reason)


@dataclass
class World:
    planner: Planner
    clock: HandClock = field(default_factory=HandClock)
    api: SmallApi = field(default_factory=SmallApi)
    cache: ObjectCache = field(default_factory=ObjectCache)
    eyes: Eyes = field(default_factory=Eyes)
    hand: Hand = field(default_factory=Hand)
    told: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.loop = SessionReconciler(
            cluster=CachedCluster(
                client=self.api,  # type: ignore[arg-type]
                cache=self.cache,
                expectations=Expectations(cache=self.cache, clock=self.clock),
            ),
            observer=self.eyes,
            hands=self.hand,
            recorder=self.told,
            budget=WriteBudget(clock=self.clock),
            clock_us=lambda: int(self.clock() * 1e6),
            plan=self.make_plan,
        )

    def make_plan(self, seen: Observed) -> Plan:
        return self.planner(seen)

    def put(self, **spec: Any) -> dict[str, Any]:
        """The session, in the API server and in the cache."""
        body = self.api.put(
            SESSIONS,
            {
                "metadata": {"namespace": "gm-a", "name": "s"},
                "spec": {"baseModelRef": {"name": "m"}, "lora": {}, **spec},
            },
        )
        self.cache.put(SESSIONS, body)
        return body

    def status(self) -> dict[str, Any]:
        found = self.api.objects["trainingsessions", "gm-a", "s"].get("status") or {}
        assert isinstance(found, dict)
        return found

    def writes(self) -> int:
        return sum(call.endswith(" status") for call in self.api.calls)


@pytest.fixture
def world() -> World:
    return World(planner=lambda seen: Plan(policy="rest"))


def accepted(seen: Observed) -> Plan:
    return Plan(policy="x", conditions=(conditions.condition("Accepted", True, "Fits"),))


async def test_a_plan_without_news_writes_nothing(world: World) -> None:
    world.put()
    world.planner = accepted
    await world.loop.reconcile(KEY)
    assert world.writes() == 1
    for _ in range(3):
        await world.loop.reconcile(KEY)
    assert world.writes() == 1


async def test_actions_run_in_order_and_the_next_plan_sees_the_status(world: World) -> None:
    world.put()

    def planner(seen: Observed) -> Plan:
        if not seen.session.status.attempt:
            return Plan(policy="claim", status={"attempt": 1})
        if len(world.hand.done) < 2:
            return Plan(policy="place", actions=(planned.Adopt(), planned.Place(attempt=1)))
        return Plan(policy="rest", again_at_us=seen.now_us + 5_000_000)

    world.planner = planner
    assert await world.loop.reconcile(KEY) == pytest.approx(5)
    assert world.hand.done == [planned.Adopt(), planned.Place(attempt=1)]
    assert world.status()["attempt"] == 1


async def test_the_status_of_a_plan_that_another_follows_at_once_is_not_written(
    world: World,
) -> None:
    world.put()

    def planner(seen: Observed) -> Plan:
        if not world.hand.done:
            return Plan(
                policy="adopt", actions=(planned.Adopt(),), status={"attempt": 7}, more=True
            )
        return accepted(seen)

    world.planner = planner
    await world.loop.reconcile(KEY)
    assert world.writes() == 1
    assert "attempt" not in world.status()


async def test_a_failed_action_ends_the_plan_and_its_error_is_seen_next_time(world: World) -> None:
    world.put()
    world.planner = lambda seen: Plan(
        policy="place",
        actions=(planned.Adopt(), planned.Register(), planned.Drain()),
        conditions=accepted(seen).conditions,
    )
    failing = UnavailableError("the ledger is away")
    world.hand.fail = lambda action: failing if action == planned.Register() else None
    with pytest.raises(StepFailedError):
        await world.loop.reconcile(KEY)
    assert world.hand.done == [planned.Adopt()]
    assert world.writes() == 1, "the status is written all the same"
    world.planner = accepted
    await world.loop.reconcile(KEY)
    assert world.eyes.errors[-1] == "the ledger is away"


async def test_an_error_is_forgotten_when_a_plan_succeeds(world: World) -> None:
    world.put()
    world.loop.errors[KEY] = "old"
    done = planned.Register()
    world.planner = lambda seen: (
        accepted(seen) if world.hand.done else Plan(policy="x", actions=(done,))
    )
    await world.loop.reconcile(KEY)
    assert world.eyes.errors == ["old", "", ""]


async def test_a_decision_on_an_older_version_is_not_written(world: World) -> None:
    body = world.put()
    world.api.put(SESSIONS, {**body, "spec": {**body["spec"], "workers": 2}})
    world.planner = accepted
    with pytest.raises(ConflictError):
        await world.loop.reconcile(KEY)
    assert world.status() == {}


async def test_tokens_alone_are_written_once_a_minute(world: World) -> None:
    world.put()
    tokens = 0

    def planner(seen: Observed) -> Plan:
        return Plan(policy="rest", status={"usage": UsageStatus(train=tokens)})

    world.planner = planner
    written = []
    for second in range(130):
        tokens = second
        await world.loop.reconcile(KEY)
        written.append(world.writes())
        world.clock.pass_s(1)
    assert written[0] <= 1
    assert world.writes() <= 3
    assert world.status()["usage"]["train"] >= 120


async def test_a_session_that_is_gone_is_forgotten(world: World) -> None:
    world.loop.errors[KEY] = "old"
    assert await world.loop.reconcile(KEY) is None
    assert world.loop.errors == {}


async def test_what_a_newer_version_wrote_is_refused_by_a_condition_and_once(world: World) -> None:
    world.put(desiredState="Hibernated")
    for _ in range(3):
        assert await world.loop.reconcile(KEY) is None
    (refusal,) = world.status()["conditions"]
    assert (refusal["type"], refusal["reason"]) == ("Accepted", NOT_UNDERSTOOD)
    assert "desiredState" in refusal["message"]
    assert world.told.events == [NOT_UNDERSTOOD]
    assert world.writes() == 1


async def test_foreign_conditions_survive(world: World) -> None:
    body = world.put()
    foreign = {"type": "example.com/Audited", "status": "True", "reason": "Yes"}
    body["status"] = {"conditions": [foreign]}
    world.cache.put(SESSIONS, world.api.put(SESSIONS, body))
    world.planner = accepted
    for _ in range(3):
        await world.loop.reconcile(KEY)
    assert {each["type"] for each in world.status()["conditions"]} == {
        "example.com/Audited",
        "Accepted",
    }


async def test_a_create_whose_answer_is_lost_is_looked_for_before_the_next_plan(
    world: World,
) -> None:
    world.put()
    lost = UnavailableError("the answer was lost")
    world.api.lose = lambda call: lost if call.startswith("create") else None
    pod = {
        "metadata": {
            "namespace": "gm-a",
            "name": "s-a1-0",
            "labels": {"gristmill.dev/session": "s"},
        }
    }
    with pytest.raises(UnavailableError):
        await world.loop.cluster.create(PODS, pod)
    assert world.cache.get(PODS, "gm-a", "s-a1-0") is None
    seen: list[bool] = []

    def planner(_: Observed) -> Plan:
        seen.append(world.cache.get(PODS, "gm-a", "s-a1-0") is not None)
        return Plan(policy="rest")

    world.planner = planner
    await world.loop.reconcile(KEY)
    assert all(seen)
    assert seen


# --- workers -------------------------------------------------------------------------------------


class Nobody:
    async def reconcile(self, name: str) -> float | None:
        return None


def workers(world: World) -> Workers:
    queue = KeyQueue(clock=world.clock, call_later=world.clock.call_later, jitter=lambda: 1.0)
    return Workers(queue=queue, sessions=world.loop, others={"Tenant": Nobody()})


async def one_pass(work: Workers) -> str:
    key, _ = await work.queue.get()
    try:
        return await work._one(key)
    finally:
        work.queue.done(key)


async def test_an_error_of_one_session_ends_nobody_elses_work(world: World) -> None:
    world.put()
    work = workers(world)

    def planner(seen: Observed) -> Plan:
        raise ZeroDivisionError("a bug")

    world.planner = planner
    work.queue.add(KEY)
    assert await one_pass(work) == "failed"
    world.clock.pass_s(0.3)
    assert len(work.queue) == 1, "it is tried again"


async def test_a_conflict_reads_anew_and_comes_again_soon(world: World) -> None:
    body = world.put()
    world.api.put(SESSIONS, body)
    world.planner = accepted
    work = workers(world)
    work.queue.add(KEY)
    assert await one_pass(work) == "stale"
    world.clock.pass_s(0.3)
    assert await one_pass(work) == "done"
    assert world.status()["conditions"][0]["type"] == "Accepted"


async def test_what_is_gone_is_no_reason_to_look_at_a_tenant_every_second(world: World) -> None:
    """The API server says 404 to something of the tenant, and the watch tells of nothing."""

    class Gone:
        async def reconcile(self, name: str) -> float | None:
            raise NotFoundError(f"tenants {name!r} not found")

    work = workers(world)
    work = replace(work, others={"Tenant": Gone()})
    work.queue.add(Key("Tenant", "", "acme"))
    looks = 0
    for _ in range(600):
        if len(work.queue):
            assert await one_pass(work) == "failed"
            looks += 1
        world.clock.pass_s(1)
    assert 5 < looks < 20


async def test_pauses_grow_while_the_ledger_is_away_and_end_with_it(world: World) -> None:
    world.put()
    away: GristmillError | None = UnavailableError("away")
    world.hand.fail = lambda action: away
    world.planner = lambda seen: (
        accepted(seen) if world.hand.done else Plan(policy="x", actions=(planned.Register(),))
    )
    work = workers(world)
    work.queue.add(KEY)
    pauses = []
    for _ in range(12):
        began = world.clock()
        assert await one_pass(work) == "transient"
        while not len(work.queue):
            world.clock.pass_s(0.1)
        pauses.append(world.clock() - began)
    assert pauses[0] < 0.5
    assert max(pauses) == pytest.approx(30, abs=1)
    away = None
    assert await one_pass(work) == "done"


async def test_lost_leadership_ends_the_work(world: World) -> None:
    world.put()
    world.planner = lambda seen: Plan(policy="x", actions=(planned.Register(),))
    world.hand.fail = lambda action: NotLeaderError("not any more")
    work = workers(world)
    work.queue.add(KEY)
    with pytest.raises(BaseExceptionGroup) as raised:
        await work.run(4)
    assert raised.group_contains(NotLeaderError)
    await settle()
