"""What a benchmark must reach, whether it did, and the table and the JSON that say so."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gristmill_testing.turns import OURS, Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a row must reach. With a `measure`: its ratio to the best of `peers` (to the best of all if
    there are none); without: the figure called `what`."""

    row: str
    what: str
    floor: float | None = None
    goal: float | None = None
    at_most: bool = False
    """Smaller is better."""
    bf16: bool = False
    """Judged only on a machine whose processor multiplies bf16."""
    measure: str = ""
    peers: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Found:
    """What a row brought."""

    row: str
    measures: list[Measure] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    load: float = 0.0
    """Of the machine when the row began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    bound: Bound
    value: float | None
    text: str

    @property
    def missed(self) -> bool:
        return self.text == MISSED


MISSED = "MISSED"


def value_of(bound: Bound, found: Found) -> float | None:
    """None: it was not measured."""
    if not bound.measure:
        return found.figures.get(bound.what)
    for measure in found.measures:
        if measure.name == bound.measure:
            wanted = bound.peers or tuple(measure.sides)
            ratios = [
                measure.ratio(side) for side in wanted if side in measure.sides and side != OURS
            ]
            return min(ratios, default=None)
    return None


def judge(bound: Bound, found: Found, *, bf16: bool, complete: bool = True) -> Verdict:
    """`bf16`: the processor multiplies it. `complete`: enough turns of the whole work for a judgement."""
    value = value_of(bound, found)
    if value is None:
        text = "not measured"
    elif bound.bf16 and not bf16:
        text = "not judged: neither avx512_bf16 nor amx"
    elif not complete:
        text = "not judged: a quick run"
    else:
        text = _reached(bound, value)
    return Verdict(bound=bound, value=value, text=text)


def _reached(bound: Bound, value: float) -> str:
    def reaches(aim: float) -> bool:
        return value <= aim if bound.at_most else value >= aim

    if bound.goal is not None and reaches(bound.goal):
        return "goal met"
    if bound.floor is not None:
        return "met" if reaches(bound.floor) else MISSED
    return "goal not reached" if bound.goal is not None else "told only"


def measured_lines(found: Found) -> Iterator[str]:
    """Each side of each measure: median, range, tokens for a second of processor time, ratios."""
    for measure in found.measures:
        yield f"{found.row}: {measure.name}"
        first = next(iter(measure.sides))
        for side, turns in measure.sides.items():
            rates = [turn.rate for turn in turns]
            spread = f"{statistics.median(rates):9.1f} [{min(rates):.1f}..{max(rates):.1f}]"
            cpu = statistics.median(turn.cpu_rate for turn in turns)
            line = f"  {side:<34} {spread:<32} {cpu:>9.1f}"
            if side != first:
                ratios = measure.ratio(side, ours=first), measure.cpu_ratio(side, ours=first)
                line += f" {ratios[0]:>8.2f} {ratios[1]:>8.2f}"
            yield line
    for name, value in found.figures.items():
        yield f"{found.row}: {name} {value:.2f}"
    yield from (f"{found.row}: {note}" for note in found.notes)


MEASURED_HEADING = (
    f"  {'tokens a second':<34} {'median [min..max]':<32} {'CPU-s':>9} {'ours/it':>8} {'by CPU':>8}"
)


def verdict_table(verdicts: Sequence[Verdict]) -> list[str]:
    """In Markdown."""
    return [
        "| work | measure | value | floor | goal | |",
        "|---|---|---|---|---|---|",
        *(
            f"| {each.bound.row} | {each.bound.what} | {_number(each.value)} "
            f"| {_aim(each.bound, each.bound.floor)} | {_aim(each.bound, each.bound.goal)} | {each.text} |"
            for each in verdicts
        ),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _aim(bound: Bound, value: float | None) -> str:
    if value is None:
        return ""
    return f"<= {value:g}" if bound.at_most else f"{value:g}"


def as_json(
    machine: dict[str, Any], found: Sequence[Found], verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    """Everything that the table says, and every turn."""
    return {
        "machine": machine,
        "rows": [asdict(each) for each in found],
        "verdicts": [
            {
                "row": each.bound.row, "what": each.bound.what, "value": each.value,
                "floor": each.bound.floor, "goal": each.bound.goal, "at_most": each.bound.at_most,
                "verdict": each.text,
            }
            for each in verdicts
        ],
    }  # fmt: skip
