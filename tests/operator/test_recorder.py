"""Events: one for a reason in ten minutes, counted in series; bursts are cut; nothing waits for them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from gristmill_contracts.errors import ForbiddenError
from gristmill_operator.kinds import Kind
from gristmill_operator.problems import NotLeaderError
from gristmill_operator.recorder import BURST, SERIES_S, EventRecorder
from gristmill_testing.hand_clock import HandClock, settle


@dataclass
class Events:
    created: list[dict[str, Any]] = field(default_factory=list)
    patched: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refuse: bool = False
    slow: bool = False

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        if self.slow:
            await asyncio.sleep(0)
        if self.refuse:
            raise ForbiddenError("the namespace is being terminated")
        self.created.append(body)
        return body

    async def merge_patch(
        self, kind: Kind, namespace: str, name: str, patch: dict[str, Any]
    ) -> dict[str, Any]:
        self.patched.append((name, patch))
        return patch


SESSION = {
    "apiVersion": "gristmill.dev/v1alpha1",
    "kind": "TrainingSession",
    "metadata": {"namespace": "gm-a", "name": "s", "uid": "u1"},
}


@dataclass
class World:
    events: Events = field(default_factory=Events)
    clock: HandClock = field(default_factory=HandClock)
    dropped: int = 0
    recorder: EventRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = EventRecorder(
            api=self.events,
            instance="pod-1",
            clock=self.clock,
            wall_us=self._wall,
            dropped=self._drop,
        )

    def _wall(self) -> int:
        return int(self.clock() * 1e6)

    def _drop(self) -> None:
        self.dropped += 1

    async def post(self) -> None:
        task = asyncio.create_task(self.recorder.run())
        await settle(200)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def world() -> World:
    return World()


async def test_an_event_says_what_happened_to_what(world: World) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "gm-a", "name": "s-a1-0", "uid": "u2"},
    }
    world.recorder.record(SESSION, "WorkerFailed", "it ended", warning=True, related=pod)
    await world.post()
    (event,) = world.events.created
    assert event["regarding"]["name"] == "s"
    assert event["related"]["kind"] == "Pod"
    assert (event["type"], event["reason"], event["note"]) == (
        "Warning",
        "WorkerFailed",
        "it ended",
    )
    assert event["metadata"]["namespace"] == "gm-a"
    assert event["reportingController"] == "gristmill.dev/operator"


async def test_the_same_reason_within_ten_minutes_is_one_event(world: World) -> None:
    for _ in range(5):
        world.recorder.record(SESSION, "Unschedulable", "no room")
        world.clock.pass_s(60)
    await world.post()
    assert len(world.events.created) == 1
    assert world.events.patched == []
    world.clock.pass_s(SERIES_S)
    await world.recorder.tell_counts()
    ((_, patch),) = world.events.patched
    assert patch["series"]["count"] == 5
    await world.recorder.tell_counts()
    assert len(world.events.patched) == 1, "a count is told once"


async def test_after_ten_minutes_it_is_a_new_event(world: World) -> None:
    for _ in range(2):
        world.recorder.record(SESSION, "Unschedulable", "no room")
    world.clock.pass_s(SERIES_S + 1)
    world.recorder.record(SESSION, "Unschedulable", "no room")
    await world.post()
    assert len(world.events.created) == 2
    names = {each["metadata"]["name"] for each in world.events.created}
    assert len(names) == 2
    ((_, patch),) = world.events.patched
    assert patch["series"]["count"] == 2, "what the first one counted is told"


async def test_a_burst_of_one_object_is_cut_and_others_are_not(world: World) -> None:
    other = {**SESSION, "metadata": {**SESSION["metadata"], "uid": "u9", "name": "t"}}  # type: ignore[dict-item]
    for n in range(100):
        world.recorder.record(SESSION, f"Reason{n}", "again")
    world.recorder.record(other, "Accepted", "yes")
    await world.post()
    assert len(world.events.created) == BURST + 1
    assert world.dropped == 100 - BURST
    world.clock.pass_s(301)
    world.recorder.record(SESSION, "Later", "one more is allowed")
    await world.post()
    assert len(world.events.created) == BURST + 2


async def test_an_event_that_cannot_be_posted_is_given_up(world: World) -> None:
    world.events.refuse = True
    world.recorder.record(SESSION, "Deleted", "bye")
    await world.post()
    world.events.refuse = False
    world.recorder.record(SESSION, "Other", "hello")
    await world.post()
    assert [each["reason"] for each in world.events.created] == ["Other"]
    assert world.dropped == 1


async def test_a_long_note_is_cut_to_what_the_api_takes(world: World) -> None:
    world.recorder.record(SESSION, "Long", "x" * 5000)
    await world.post()
    assert len(world.events.created[0]["note"]) == 1024


async def test_a_warning_does_not_wait_behind_a_burst_of_good_news(world: World) -> None:
    for number in range(20):
        world.recorder.record(SESSION, f"Fine{number}", "all is well")
    world.recorder.record(SESSION, "QuotaExceeded", "no room", warning=True)
    await world.post()
    reasons = [each["reason"] for each in world.events.created]
    assert reasons == ["QuotaExceeded", *(f"Fine{number}" for number in range(20))]


@pytest.mark.parametrize("turns", range(12))
async def test_it_ends_when_it_is_cancelled_whatever_it_does_at_that_moment(
    world: World, turns: int
) -> None:
    """One that lives on keeps a process alive that has lost its lead: nobody works then, and nobody ends it."""
    world.events.slow = True
    for number in range(100):
        world.recorder.record(session(number), "Started", "")
    running = asyncio.create_task(world.recorder.run())
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert running.done()
    assert len(world.events.created) < 100, "there was work left"


def session(number: int) -> dict[str, Any]:
    return {**SESSION, "metadata": {"namespace": "gm-a", "name": "s", "uid": f"u{number}"}}


async def test_it_ends_with_the_lead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> dict[str, Any]:
        raise NotLeaderError("another leads")

    monkeypatch.setattr(world.events, "create", refuse)
    world.recorder.record(SESSION, "Started", "")
    with pytest.raises(NotLeaderError):
        await world.recorder.run()
