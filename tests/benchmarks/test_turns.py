"""Sides take turns, and what is compared is the ratio of their medians."""

import pytest

from gristmill_testing.turns import OURS, Measure, Play, Turn, take_turns, timed


def turn(tokens: int, wall_s: float, cpu_s: float = 1.0) -> Turn:
    return Turn(tokens=tokens, wall_s=wall_s, cpu_s=cpu_s)


def recording(seen: list[tuple[str, int]], name: str) -> Play:
    def play(seed: int) -> tuple[Turn, ...]:
        seen.append((name, seed))
        return (turn(seed, 1.0), turn(10 * seed, 1.0))

    return play


def test_every_side_warms_up_once_and_then_who_begins_changes() -> None:
    seen: list[tuple[str, int]] = []
    sides = {name: recording(seen, name) for name in ("a", "b", "c")}
    take_turns(["one", "two"], sides, turns=4)
    assert seen[:3] == [("a", 1), ("b", 1), ("c", 1)]
    assert [name for name, _ in seen[3:]] == [*"abc", *"bca", *"cab", *"abc"]


def test_all_sides_get_the_same_work_in_a_turn_and_other_work_in_the_next() -> None:
    seen: list[tuple[str, int]] = []
    take_turns(["one", "two"], {name: recording(seen, name) for name in "ab"}, turns=2)
    assert {name: [seed for who, seed in seen if who == name] for name in "ab"} == {
        "a": [1, 2, 3], "b": [1, 2, 3],
    }  # fmt: skip


def test_the_warm_up_counts_for_no_measure() -> None:
    measures = take_turns(["one", "two"], {"a": recording([], "a")}, turns=3)
    found = {each.name: [taken.tokens for taken in each.sides["a"]] for each in measures}
    assert found == {"one": [2, 3, 4], "two": [20, 30, 40]}


def test_a_side_that_misses_a_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        take_turns(["one", "two"], {"a": lambda _: (turn(1, 1.0),)}, turns=1)


def test_the_ratio_is_of_medians_and_one_slow_turn_changes_nothing() -> None:
    sides = {
        OURS: [turn(100, 1.0), turn(100, 1.0), turn(100, 50.0)],
        "peer": [turn(100, 2.0), turn(100, 2.0), turn(100, 0.1)],
    }
    measure = Measure(name="m", sides=sides)
    assert measure.ratio("peer") == pytest.approx(2.0)


def test_the_ratio_by_processor_time_is_told_apart_from_the_clocks() -> None:
    sides = {OURS: [turn(100, 1.0, cpu_s=1.0)], "peer": [turn(100, 1.0, cpu_s=3.0)]}
    measure = Measure(name="m", sides=sides)
    assert measure.cpu_ratio("peer") == pytest.approx(3.0)
    assert measure.ratio("peer") == pytest.approx(1.0)


def test_the_decode_phase_is_what_the_whole_takes_more_than_its_first_token() -> None:
    whole, first = turn(64, 3.0, cpu_s=5.0), turn(1, 1.0, cpu_s=2.0)
    assert whole - first == turn(63, 2.0, cpu_s=3.0)


def test_a_phase_that_took_nothing_measurable_has_no_speed() -> None:
    assert turn(63, -0.1, cpu_s=-0.1).rate == 0.0
    assert turn(63, -0.1, cpu_s=-0.1).cpu_rate == 0.0
    assert (
        Measure(name="m", sides={OURS: [turn(1, 1.0)], "peer": [turn(1, 0.0)]}).ratio("peer") == 0
    )


def test_processor_time_is_that_of_whoever_works() -> None:
    clock = iter([10.0, 12.5])
    taken = timed(lambda: 7, cpu_s=lambda: next(clock))
    assert (taken.tokens, taken.cpu_s) == (7, 2.5)
