"""The work queue: each key once, one worker a key, backoff, and keys for later."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_operator.queue import BACKOFF_MAX_S, KeyQueue
from gristmill_operator.seams import Key
from gristmill_testing.hand_clock import HandClock, settle


def key(name: str) -> Key:
    return Key("TrainingSession", "gm-a", name)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def queue(clock: HandClock) -> KeyQueue:
    return KeyQueue(clock=clock, call_later=clock.call_later, jitter=lambda: 1.0)


async def test_a_key_that_is_added_often_is_worked_on_once(queue: KeyQueue) -> None:
    for _ in range(3):
        queue.add(key("a"))
    assert (await queue.get())[0] == key("a")
    queue.done(key("a"))
    assert len(queue) == 0


async def test_keys_come_in_the_order_in_which_they_were_added(queue: KeyQueue) -> None:
    for name in "abc":
        queue.add(key(name))
    assert [(await queue.get())[0].name for _ in range(3)] == ["a", "b", "c"]


async def test_what_is_nearly_done_goes_before_what_is_to_be_begun(
    queue: KeyQueue, clock: HandClock
) -> None:
    for name in "abc":
        queue.add(key(name))
        clock.pass_s(1)
    queue.add(key("c"), first=True)
    queue.add(key("d"), first=True)
    assert (len(queue), queue.oldest_s()) == (4, 3.0)
    taken = [(await queue.get())[0].name for _ in range(4)]
    assert taken == ["c", "d", "a", "b"]
    assert (len(queue), queue.oldest_s()) == (0, 0.0)
    for name in taken:
        queue.done(key(name))
    assert len(queue) == 0, "a key that was in both places is worked on once"


async def test_what_goes_first_keeps_nothing_out_for_ever(queue: KeyQueue) -> None:
    queue.add(key("new"))
    for number in range(5):
        queue.add(key(f"{number}"), first=True)
    taken = [(await queue.get())[0].name for _ in range(6)]
    assert taken == ["0", "1", "2", "new", "3", "4"]


async def test_a_key_added_during_its_work_is_given_out_again_after_it(queue: KeyQueue) -> None:
    queue.add(key("a"))
    await queue.get()
    queue.add(key("a"))
    queue.add(key("a"))
    assert len(queue) == 0, "two workers must never have one key"
    queue.done(key("a"))
    assert (await queue.get())[0] == key("a")
    queue.done(key("a"))
    assert len(queue) == 0


async def test_a_worker_waits_for_a_key_and_is_told_how_long_the_key_waited(
    queue: KeyQueue, clock: HandClock
) -> None:
    queue.add(key("a"))
    clock.pass_s(2.5)
    assert (await queue.get())[1] == 2.5
    waiting = asyncio.create_task(queue.get())
    await settle()
    assert not waiting.done()
    queue.add(key("b"))
    assert await waiting == (key("b"), 0.0)


async def test_a_cancelled_worker_loses_no_key(queue: KeyQueue) -> None:
    first, second = (asyncio.create_task(queue.get()) for _ in range(2))
    await settle()
    queue.add(key("a"))
    first.cancel()
    assert (await second)[0] == key("a")


async def test_a_key_for_later_comes_then(queue: KeyQueue, clock: HandClock) -> None:
    queue.add_after(key("a"), 10)
    clock.pass_s(9.9)
    assert len(queue) == 0
    clock.pass_s(0.2)
    assert len(queue) == 1


async def test_the_earliest_of_several_times_holds(queue: KeyQueue, clock: HandClock) -> None:
    queue.add_after(key("a"), 10)
    queue.add_after(key("a"), 3)
    queue.add_after(key("a"), 20)
    clock.pass_s(3)
    assert (await queue.get())[0] == key("a")
    queue.done(key("a"))
    clock.pass_s(60)
    assert len(queue) == 0, "the later times are outdated"


async def test_a_key_that_is_added_now_does_not_come_again_later(
    queue: KeyQueue, clock: HandClock
) -> None:
    queue.add_after(key("a"), 10)
    queue.add(key("a"))
    await queue.get()
    queue.done(key("a"))
    clock.pass_s(60)
    assert len(queue) == 0


async def test_each_failure_doubles_the_pause_up_to_a_limit(
    queue: KeyQueue, clock: HandClock
) -> None:
    pauses = []
    for _ in range(16):
        pauses.append(queue.add_limited(key("a")))
        clock.pass_s(BACKOFF_MAX_S)
        await queue.get()
        queue.done(key("a"))
    assert pauses[:4] == [0.2, 0.4, 0.8, 1.6]
    assert pauses[-1] == BACKOFF_MAX_S
    queue.forget(key("a"))
    assert queue.add_limited(key("a")) == 0.2


async def test_pauses_differ_so_that_many_keys_do_not_come_at_once(clock: HandClock) -> None:
    queue = KeyQueue(clock=clock, call_later=clock.call_later)
    pauses = {queue.add_limited(key(f"s{n}")) for n in range(50)}
    assert len(pauses) > 40
    assert all(0.16 <= pause <= 0.24 for pause in pauses)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "first", "after", "take", "done", "pass"]), st.integers(0, 3)
        ),
        max_size=60,
    )
)
def test_no_key_is_ever_lost_or_given_to_two(steps: list[tuple[str, int]]) -> None:
    """A model beside the queue: what was added since the last take must come out in the end."""
    asyncio.run(_run(steps))


async def _run(steps: list[tuple[str, int]]) -> None:
    clock = HandClock()
    queue = KeyQueue(clock=clock, call_later=clock.call_later, jitter=lambda: 1.0)
    owed: set[Key] = set()
    taken: set[Key] = set()
    for step, number in steps:
        each = key(str(number))
        if step in ("add", "first"):
            queue.add(each, first=step == "first")
            owed.add(each)
        elif step == "after":
            queue.add_after(each, number + 1)
            owed.add(each)
        elif step == "take" and len(queue):
            await _take(queue, owed, taken)
        elif step == "done" and each in taken:
            taken.remove(each)
            queue.done(each)
        elif step == "pass":
            clock.pass_s(number)
    for each in taken:
        queue.done(each)
    clock.pass_s(100)
    while len(queue):
        got = (await queue.get())[0]
        owed.discard(got)
        queue.done(got)
    assert not owed


async def _take(queue: KeyQueue, owed: set[Key], taken: set[Key]) -> None:
    got = (await queue.get())[0]
    assert got not in taken, "two workers have one key"
    assert got in owed, "nobody asked for it"
    taken.add(got)
    # It may still be owed: a later time was asked for before this take.
    if got not in queue._due:
        owed.discard(got)
