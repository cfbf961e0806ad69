"""The calls that an operator makes of the API server for one object, and the faults that each can meet."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill_testing.api_proxy import ApiProxy, Fault, Kind, Seen

KINDS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("refuse", {"status": 429, "reason": "TooManyRequests", "retry_after_s": 1}),
    ("refuse", {"status": 500}),
    ("hang", {"seconds": 4.0}),
    ("lose", {}),
)
"""429, 500, an answer that never comes, and one that comes not though the thing was done."""


@dataclass(frozen=True, slots=True)
class Call:
    """The `nth` request (from 0) of one kind; its object's name is left open as {}."""

    line: str
    nth: int

    def pattern(self, name: str) -> str:
        """For a fault that hits this call of the object `name`."""
        return "^" + re.escape(self.line.replace("{}", name)) + "$"


def calls_of(name: str, seen: Iterable[Seen]) -> list[Call]:
    """Those that name the object, in order. Events are left out: they may be lost."""
    found: list[Call] = []
    counts: Counter[str] = Counter()
    named = re.compile(rf"\b{re.escape(name)}\b")
    for each in seen:
        if "/events" in each.line or "watch=true" in each.line or not named.search(each.line):
            continue
        line = named.sub("{}", each.line)
        found.append(Call(line, counts[line]))
        counts[line] += 1
    return found


@dataclass(frozen=True, slots=True)
class Trial:
    """One object that meets one fault."""

    name: str
    call: Call
    fault: Fault

    def __str__(self) -> str:
        return f"{self.name}: {self.fault.kind} {self.fault.status} at {self.call.line} no. {self.call.nth}"


def trials(proxy: ApiProxy, calls: Sequence[Call], prefix: str) -> list[Trial]:
    """A fault of each kind for each call, each for an object of its own."""
    made = []
    for number, call in enumerate(calls):
        for letter, (kind, options) in zip("abcd", KINDS, strict=True):
            name = f"{prefix}{number}{letter}"
            fault = proxy.inject(kind, call.pattern(name), skip=call.nth, **options)
            made.append(Trial(name, call, fault))
    return made
