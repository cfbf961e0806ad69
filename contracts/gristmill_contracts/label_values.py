"""Bounded values of a label: a name that somebody makes up must not make a series for ever."""

from collections.abc import Callable
from typing import Final

from gristmill_contracts import limits

OTHER: Final = "other"
"""Value of the series that all share which have none of their own."""


class LabelValues:
    """The first values of a label have their own series; `overflowed` is told each further one once."""

    def __init__(
        self, overflowed: Callable[[], None], *, values_max: int = limits.METRIC_LABEL_VALUES_MAX
    ) -> None:
        self._overflowed = overflowed
        self._values_max = values_max
        self._own: set[str] = set()
        self._others: set[str] = set()

    def shown(self, value: str) -> str:
        """The value itself, or OTHER."""
        if value in self._own:
            return value
        if len(self._own) < self._values_max:
            self._own.add(value)
            return value
        if value not in self._others and len(self._others) < limits.METRIC_OTHER_VALUES_MAX:
            self._others.add(value)
            self._overflowed()
        return OTHER
