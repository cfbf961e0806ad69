"""Times for people and programs."""

from datetime import UTC, datetime
from typing import Final

from gristmill_contracts.units import now_us

_UNITS: Final = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def iso(time_us: int | None) -> str | None:
    """UTC in ISO 8601, to the second."""
    if not time_us:
        return None
    moment = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    return moment.isoformat().replace("+00:00", "Z")


def age(time_us: int | None, at_us: int | None = None) -> str:
    """How long ago, in its largest unit."""
    if not time_us:
        return ""
    seconds = max(0, ((now_us() if at_us is None else at_us) - time_us) // 1_000_000)
    name, size = next((unit for unit in _UNITS if seconds >= unit[1]), _UNITS[-1])
    return f"{seconds // size}{name}"
