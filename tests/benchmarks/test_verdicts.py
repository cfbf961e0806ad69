"""What is met and what is missed, and the table and the JSON that say so."""

import json
from typing import Any

import pytest

from gristmill_testing.turns import OURS, Measure, Turn
from gristmill_testing.verdicts import (
    MISSED,
    Bound,
    Found,
    as_json,
    judge,
    measured_lines,
    value_of,
    verdict_table,
)


def sides(**rates: float) -> dict[str, list[Turn]]:
    return {
        OURS if name == "ours" else name: [Turn(tokens=int(rate), wall_s=1.0, cpu_s=1.0)]
        for name, rate in rates.items()
    }


def found(figures: dict[str, float] | None = None, **rates: float) -> Found:
    measures = [Measure(name="training", sides=sides(**rates))] if rates else []
    return Found(row="r", measures=measures, figures=figures or {})


def bound(**changes: Any) -> Bound:
    return Bound(**{"row": "r", "what": "x", "floor": 1.4, "goal": 1.6, **changes})


@pytest.mark.parametrize(
    ("value", "text"), [(1.39, MISSED), (1.4, "met"), (1.59, "met"), (1.6, "goal met")]
)
def test_a_ratio_is_judged_by_floor_and_goal(value: float, text: str) -> None:
    assert judge(bound(), found({"x": value}), bf16=True).text == text


@pytest.mark.parametrize(
    ("value", "text"), [(4.21, MISSED), (4.2, "met"), (3.41, "met"), (3.4, "goal met")]
)
def test_of_memory_and_time_less_is_better(value: float, text: str) -> None:
    given = bound(floor=4.2, goal=3.4, at_most=True)
    assert judge(given, found({"x": value}), bf16=True).text == text


def test_without_a_floor_nothing_can_be_missed() -> None:
    assert judge(bound(floor=None), found({"x": 1.0}), bf16=True).text == "goal not reached"
    assert judge(bound(floor=None, goal=None), found({"x": 1.0}), bf16=True).text == "told only"


def test_bf16_is_judged_only_where_the_processor_multiplies_it() -> None:
    slow = found({"x": 1.0})
    assert judge(bound(bf16=True), slow, bf16=True).missed
    assert not judge(bound(bf16=True), slow, bf16=False).missed
    assert judge(bound(bf16=False), slow, bf16=False).missed


def test_a_quick_run_and_what_was_not_measured_are_not_judged() -> None:
    assert judge(bound(), found({"x": 1.0}), bf16=True, complete=False).text.startswith(
        "not judged"
    )
    assert judge(bound(), found(), bf16=True).text == "not measured"


def test_the_best_peer_is_the_fastest_of_all() -> None:
    given = found(ours=300, slow=100, fast=200)
    assert value_of(bound(measure="training"), given) == pytest.approx(1.5)
    assert value_of(bound(measure="training", peers=("slow",)), given) == pytest.approx(3.0)


def test_a_peer_that_was_not_run_is_no_peer() -> None:
    given = bound(measure="training", peers=("gone",))
    assert value_of(given, found(ours=300, slow=100)) is None
    assert value_of(bound(measure="other"), found(ours=300, slow=100)) is None


def test_the_table_has_a_line_for_each_bound_with_its_verdict() -> None:
    verdicts = [
        judge(bound(what="x"), found({"x": 1.0}), bf16=True),
        judge(bound(what="y", floor=4.2, goal=3.4, at_most=True), found({"y": 3.0}), bf16=True),
        judge(bound(what="z", floor=None), found(), bf16=True),
    ]
    assert verdict_table(verdicts)[2:] == [
        "| r | x | 1.00 | 1.4 | 1.6 | MISSED |",
        "| r | y | 3.00 | <= 4.2 | <= 3.4 | goal met |",
        "| r | z |  |  | 1.6 | not measured |",
    ]


def test_each_side_has_a_line_with_its_ratio_and_each_figure_one() -> None:
    lines = list(measured_lines(found({"GB": 3.25}, ours=300, peer=100)))
    assert [line.split()[0] for line in lines] == ["r:", OURS, "peer", "r:"]
    assert lines[2].split()[-2:] == ["3.00", "3.00"]
    assert lines[3] == "r: GB 3.25"


def test_json_holds_the_machine_every_turn_and_every_verdict() -> None:
    given = found({"x": 1.0}, ours=300, peer=100)
    told = as_json({"cores": 2}, [given], [judge(bound(), given, bf16=True)])
    back = json.loads(json.dumps(told))
    assert back["machine"] == {"cores": 2}
    [row] = back["rows"]
    assert row["measures"][0]["sides"]["peer"] == [{"tokens": 100, "wall_s": 1.0, "cpu_s": 1.0}]
    [verdict] = back["verdicts"]
    assert (verdict["value"], verdict["floor"], verdict["verdict"]) == (1.0, 1.4, MISSED)
