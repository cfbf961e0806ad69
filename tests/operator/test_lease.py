"""One leader at most, on clocks that disagree and a network that fails."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from gristmill_contracts.errors import ConflictError, NotFoundError, UnavailableError
from gristmill_operator.kinds import Kind
from gristmill_operator.lease import Elector
from gristmill_operator.problems import AlreadyExistsError, NotLeaderError
from gristmill_testing.hand_clock import HandClock, settle

LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0


@dataclass
class LeaseServer:
    """Keeps one Lease, with the API server's rules for versions."""

    lease: dict[str, Any] | None = None
    version: int = 0
    writes: int = 0
    cut_off: set[str] = field(default_factory=set)
    """Identities whose requests get no answer."""
    lost_answers: set[str] = field(default_factory=set)
    """Identities whose writes arrive, and whose answers do not."""

    def _answer(self, caller: str) -> dict[str, Any]:
        assert self.lease is not None
        if caller in self.lost_answers:
            raise UnavailableError("the answer was lost")
        meta = {"resourceVersion": str(self.version)}
        return {"metadata": meta, "spec": dict(self.lease)}

    def get(self, caller: str) -> dict[str, Any]:
        if caller in self.cut_off:
            raise UnavailableError("no route")
        if self.lease is None:
            raise NotFoundError("no lease")
        return self._answer(caller)

    def write(self, caller: str, version: str | None, spec: dict[str, Any]) -> dict[str, Any]:
        if caller in self.cut_off:
            raise UnavailableError("no route")
        if version is None and self.lease is not None:
            raise AlreadyExistsError("there is one")
        if version is not None and version != str(self.version):
            raise ConflictError("stale")
        self.lease = {**(self.lease or {}), **spec}
        self.version += 1
        self.writes += 1
        return self._answer(caller)


@dataclass
class Caller:
    server: LeaseServer
    identity: str

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        return self.server.get(self.identity)

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        return self.server.write(self.identity, None, body["spec"])

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]
    ) -> dict[str, Any]:
        version = patch["metadata"]["resourceVersion"]
        return self.server.write(self.identity, version, patch["spec"])


def elector(server: LeaseServer, clock: HandClock, identity: str, wall_us: int = 0) -> Elector:
    return Elector(
        api=Caller(server, identity),
        namespace="gristmill-system",
        identity=identity,
        lease_s=LEASE_S,
        renew_s=RENEW_S,
        retry_s=RETRY_S,
        clock=clock,
        wall_us=lambda: wall_us,
        sleep=clock.sleep,
    )


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def server() -> LeaseServer:
    return LeaseServer()


async def test_the_first_leads_and_the_second_waits(server: LeaseServer, clock: HandClock) -> None:
    first, second = elector(server, clock, "a"), elector(server, clock, "b")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    holding = asyncio.create_task(first.hold())
    await clock.pass_slowly(120)
    assert first.leads
    assert first.fence() > RENEW_S - RETRY_S - 1
    assert not second.leads
    with pytest.raises(NotLeaderError, match="does not hold the Lease"):
        second.fence()
    for task in (waiting, holding):
        task.cancel()


async def test_a_released_lease_is_taken_at_the_next_try(
    server: LeaseServer, clock: HandClock
) -> None:
    first, second = elector(server, clock, "a"), elector(server, clock, "b")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await settle()
    await first.release()
    assert not first.leads
    await clock.pass_slowly(RETRY_S + 0.5)
    assert waiting.done()
    assert second.leads


async def test_a_leader_that_cannot_renew_stops_before_another_begins(
    server: LeaseServer, clock: HandClock
) -> None:
    first, second = elector(server, clock, "a"), elector(server, clock, "b")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    await clock.pass_slowly(5)
    server.cut_off.add("a")
    began = clock()
    stopped_at = taken_at = None
    for _ in range(400):
        await clock.pass_slowly(0.1, step_s=0.1)
        assert not (first.leads and second.leads)
        stopped_at = stopped_at or (None if first.leads else clock())
        taken_at = taken_at or (clock() if second.leads else None)
        if taken_at:
            break
    assert stopped_at is not None
    assert taken_at is not None
    assert stopped_at - began <= RENEW_S
    assert taken_at - stopped_at >= LEASE_S - RENEW_S - RETRY_S
    with pytest.raises(NotLeaderError):
        await holding
    gave_up_s = first.lost_s
    clock.now += 7
    assert first.lost_s == gave_up_s + 7
    assert second.lost_s == 0
    waiting.cancel()


async def test_a_renewal_whose_answer_is_lost_does_not_end_the_lead(
    server: LeaseServer, clock: HandClock
) -> None:
    first = elector(server, clock, "a")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    await clock.pass_slowly(3)
    server.lost_answers.add("a")
    await clock.pass_slowly(4)
    server.lost_answers.clear()
    await clock.pass_slowly(30)
    assert first.leads
    assert not holding.done()
    holding.cancel()


async def test_clocks_that_disagree_do_not_matter(server: LeaseServer, clock: HandClock) -> None:
    """The holder's clock is a year ahead, or behind: only changes as seen from here count."""
    year_us = 365 * 86_400 * 1_000_000
    first = elector(server, clock, "a", wall_us=-year_us + 10**16)
    second = elector(server, clock, "b", wall_us=year_us)
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    waiting = asyncio.create_task(second.acquire())
    await clock.pass_slowly(60)
    assert first.leads
    assert not second.leads
    for task in (waiting, holding):
        task.cancel()


async def test_a_lease_left_by_a_dead_holder_is_taken_after_its_time(
    server: LeaseServer, clock: HandClock
) -> None:
    await elector(server, clock, "dead").acquire()
    second = elector(server, clock, "b")
    waiting = asyncio.create_task(second.acquire())
    await clock.pass_slowly(LEASE_S - 1)
    assert not second.leads
    await clock.pass_slowly(2 + RETRY_S)
    assert waiting.done()
    assert second.leads
    assert server.lease is not None
    assert server.lease["leaseTransitions"] == 2


async def test_one_of_many_wins_a_free_lease(server: LeaseServer, clock: HandClock) -> None:
    all_of_them = [elector(server, clock, f"e{n}") for n in range(8)]
    tasks = [asyncio.create_task(each.acquire()) for each in all_of_them]
    await clock.pass_slowly(5)
    assert sum(each.leads for each in all_of_them) == 1
    for task in tasks:
        task.cancel()


async def test_a_holder_that_sees_another_name_in_the_lease_stops_at_once(
    server: LeaseServer, clock: HandClock
) -> None:
    first = elector(server, clock, "a")
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    await settle()
    server.write("somebody", str(server.version), {"holderIdentity": "b"})
    await clock.pass_slowly(2 * RETRY_S + 1)
    assert holding.done()
    assert not first.leads
    with pytest.raises(NotLeaderError):
        await holding
