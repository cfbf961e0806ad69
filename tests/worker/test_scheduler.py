"""Who runs next: the rule between training and sampling, and who joins the batch."""

from dataclasses import dataclass, field

import pytest

from gristmill_worker.scheduler import (
    BLOCKS_PER_STEP_MAX,
    ROWS_TOGETHER_MIN,
    Capacity,
    Need,
    Shares,
    Side,
    next_session,
    prefills_now,
    rows_to_begin,
    tokens_together,
    with_begun,
)


@dataclass(slots=True, kw_only=True)
class World:
    """An engine whose time is counted by hand. Training sends its next piece `gap_s` after an answer."""

    piece_s: float
    step_s: float
    gap_s: float = 0.0
    samples: bool = True
    trains: bool = True
    now_s: float = 0.0
    next_piece_s: float = 0.0
    shares: Shares = field(default_factory=Shares)
    spent: dict[Side, float] = field(default_factory=lambda: {"work": 0.0, "sampling": 0.0})
    waited: dict[Side, float] = field(default_factory=lambda: {"work": 0.0, "sampling": 0.0})
    """The longest that a side had to wait for the other."""
    since: dict[Side, float] = field(default_factory=lambda: {"work": 0.0, "sampling": 0.0})

    def wants_work(self) -> bool:
        return self.trains and self.now_s >= self.next_piece_s

    def run(self, seconds: float) -> None:
        end = self.now_s + seconds
        while self.now_s < end:
            side = self.shares.next(work=self.wants_work(), sampling=self.samples)
            if side is None:
                self.now_s = min(end, self.next_piece_s)
                continue
            began = max(self.since[side], self.next_piece_s if side == "work" else 0.0)
            self.waited[side] = max(self.waited[side], self.now_s - began)
            took = self.piece_s if side == "work" else self.step_s
            self.now_s += took
            self.spent[side] += took
            self.since[side] = self.now_s
            if side == "work":
                self.next_piece_s = self.now_s + self.gap_s
            waits = self.samples if side == "work" else self.wants_work()
            self.shares.ran(side, took, other_waits=waits)


@pytest.mark.parametrize("piece_s", [0.25, 2.0, 16.0])
@pytest.mark.parametrize("gap_s", [0.0, 0.0625])
def test_each_side_gets_half_of_the_time_while_both_wait(piece_s: float, gap_s: float) -> None:
    """Also where training is away for a moment between two pieces, as a client is."""
    world = World(piece_s=piece_s, step_s=0.03125, gap_s=gap_s)
    world.run(1000.0)
    assert world.spent["work"] / world.now_s == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("piece_s", [0.25, 2.0, 16.0])
def test_neither_side_waits_longer_than_the_other_was_ahead(piece_s: float) -> None:
    world = World(piece_s=piece_s, step_s=0.03125)
    world.run(1000.0)
    assert world.waited["sampling"] <= 2 * piece_s
    assert world.waited["work"] <= piece_s + 2 * world.step_s


def test_a_side_alone_has_all_the_time_and_owes_nothing_for_it() -> None:
    """After an hour of training alone, training still gets its half at once."""
    world = World(piece_s=1.0, step_s=0.125, samples=False)
    world.run(3600.0)
    assert world.spent == {"work": 3600.0, "sampling": 0.0}
    world.samples = True
    world.since = {"work": world.now_s, "sampling": world.now_s}
    world.run(100.0)
    assert world.spent["work"] - 3600.0 == pytest.approx(50.0, abs=2.0)
    assert world.waited["work"] <= 1.5


@pytest.mark.parametrize(
    ("first", "second"), [("work", "sampling"), ("sampling", "work")], ids=["work", "sampling"]
)
def test_time_that_nobody_else_wanted_makes_no_lead_and_pays_one_back(
    first: Side, second: Side
) -> None:
    sign = 1.0 if first == "work" else -1.0
    shares = Shares()
    shares.ran(first, 4.0, other_waits=True)
    assert shares.ahead_s == 4.0 * sign
    shares.ran(first, 1.0, other_waits=False)
    assert shares.ahead_s == 4.0 * sign
    shares.ran(second, 1.0, other_waits=False)
    assert shares.ahead_s == 3.0 * sign
    shares.ran(second, 10.0, other_waits=False)
    assert shares.ahead_s == 0.0


def test_sampling_that_ended_has_no_claim_on_later_time() -> None:
    shares = Shares()
    shares.ran("work", 60.0, other_waits=True)
    shares.sampling_ended()
    assert shares.next(work=True, sampling=True) == "sampling"  # turn about
    shares.ran("sampling", 0.125, other_waits=True)
    assert shares.next(work=True, sampling=True) == "work"


def test_nobody_runs_where_nobody_wants_to() -> None:
    assert Shares().next(work=False, sampling=False) is None


def need(rows: int = 1, prompt: int = 10, each: int = 10, adapter: str = "") -> Need:
    return Need(rows=rows, prompt=prompt, each=each, adapter=adapter)


def capacity(rows: int = 1, positions: int = 0, *adapters: str) -> Capacity:
    return Capacity(
        rows_max=64, positions_max=1000, adapters_max=2, rows=rows, positions=positions,
        adapters=frozenset(adapters),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "held", "begin"),
    [
        pytest.param(need(), capacity(), 1, id="one row beside others"),
        pytest.param(need(), capacity(64), 0, id="no row is free"),
        pytest.param(need(rows=32), capacity(40), 24, id="as many as are free"),
        pytest.param(need(rows=32), capacity(60), 0, id="too few to begin together"),
        pytest.param(need(rows=3), capacity(62), 0, id="a small group begins as a whole"),
        pytest.param(need(), capacity(1, 981), 0, id="no positions are free"),
        pytest.param(need(), capacity(1, 980), 1, id="just enough positions"),
        pytest.param(need(rows=40, each=30), capacity(1, 100), 29, id="positions bound the rows"),
        pytest.param(need(rows=9, each=5000), capacity(0), 1, id="alone, one row always may"),
        pytest.param(need(rows=9, each=100), capacity(0), 9, id="alone, as many as fit"),
        pytest.param(need(adapter="c"), capacity(2, 20, "a", "b"), 0, id="too many adapters"),
        pytest.param(need(adapter="b"), capacity(2, 20, "a", "b"), 1, id="an adapter in use"),
        pytest.param(need(), capacity(2, 20, "a", "b"), 1, id="the base alone is no adapter"),
    ],
)  # fmt: skip
def test_rows_begin_where_all_of_them_fit(asked: Need, held: Capacity, begin: int) -> None:
    assert rows_to_begin(asked, held) == begin
    assert ROWS_TOGETHER_MIN == 16


def test_what_a_group_needs_is_held_once_it_has_begun() -> None:
    held = with_begun(capacity(2, 20, "a"), need(rows=3, prompt=7, each=5, adapter="b"))
    assert held == capacity(5, 42, "a", "b")
    assert with_begun(held, need()) == capacity(6, 62, "a", "b")


@pytest.mark.parametrize(
    ("rows", "blocks", "budget", "tokens"),
    [
        pytest.param(0, 9, 2048, 2048, id="nobody reads: the budget"),
        pytest.param(5, 0, 2048, 1024, id="what the blocks of one turn have"),
        pytest.param(5, 3, 2048, 256, id="what is left of them"),
        pytest.param(5, 0, 300, 300, id="no more than the budget"),
    ],
)
def test_prompts_that_run_together_hold_up_readers_no_longer_than_their_blocks_would(
    rows: int, blocks: int, budget: int, tokens: int
) -> None:
    found = tokens_together(rows=rows, blocks_since_step=blocks, block=256, budget=budget)
    assert found == tokens
    assert BLOCKS_PER_STEP_MAX == 4


def test_prompts_and_steps_take_turns() -> None:
    assert prefills_now(waits=True, rows=0, blocks_since_step=99)
    assert prefills_now(waits=True, rows=5, blocks_since_step=BLOCKS_PER_STEP_MAX - 1)
    assert not prefills_now(waits=True, rows=5, blocks_since_step=BLOCKS_PER_STEP_MAX)
    assert not prefills_now(waits=False, rows=5, blocks_since_step=0)


def test_sessions_take_turns_to_begin() -> None:
    waiting = ["b", "a", "c"]
    order, last = [], ""
    for _ in range(5):
        last = next_session(waiting, last) or ""
        order.append(last)
    assert order == ["a", "b", "c", "a", "b"]
    assert next_session([], "a") is None
