"""Condition types and reasons of our resources, and how a list of conditions changes. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from gristmill_contracts.resources import Condition

ACCEPTED: Final = "Accepted"
LEDGER_REGISTERED: Final = "LedgerRegistered"
QUOTA_RESERVED: Final = "QuotaReserved"
PODS_READY: Final = "PodsReady"
STARTED: Final = "Started"
"""True from the first time that the session served, for good: Blocked is never shown before it."""
READY: Final = "Ready"
"""A call now is accepted."""
SERVING: Final = "Serving"
"""A call now runs without waiting for a start or a recovery."""
PARKED: Final = "Parked"
BLOCKED: Final = "Blocked"
USAGE_FLUSHED: Final = "UsageFlushed"
"""The ledger has all usage of a session that ends, or a record of what it will never get."""
STOPPED: Final = "Stopped"
FAILED: Final = "Failed"
EXPIRED: Final = "Expired"
DELETED: Final = "Deleted"

# --- of Tenants, BaseModels and RateCards --------------------------------------------------------
NAMESPACE_READY: Final = "NamespaceReady"
NETWORK_READY: Final = "NetworkReady"
QUOTA_READY: Final = "QuotaReady"
BUDGET_AVAILABLE: Final = "BudgetAvailable"
WEIGHTS_AVAILABLE: Final = "WeightsAvailable"
DEVICES_OFFERED: Final = "DevicesOffered"
RECORDED: Final = "Recorded"
"""The ledger holds the rate card's prices."""

DELETION_ERRORS: Final = frozenset({"FlushFailed", "PodStuckTerminating", "VolumeInUse"})
"""Reasons of `Deleted=False` that make a running deletion a failed one."""

Status = Literal["True", "False", "Unknown"]


def condition(type_: str, status: bool | None, reason: str, message: str = "") -> Condition:
    """A condition to merge. `status` None = Unknown. Time and generation are filled by `merge`."""
    word: Status = "Unknown" if status is None else "True" if status else "False"
    return Condition(type=type_, status=word, reason=reason, message=message)


def find(conditions: Iterable[Condition], type_: str) -> Condition | None:
    return next((each for each in conditions if each.type == type_), None)


def is_true(conditions: Iterable[Condition], type_: str) -> bool:
    found = find(conditions, type_)
    return found is not None and found.status == "True"


def merge(
    conditions: Sequence[Condition], changes: Iterable[Condition], *, now_us: int, generation: int
) -> list[Condition]:
    """`conditions` with `changes` put in by type, others kept as they are.

    The transition time moves only where the status changes. What says nothing new is left untouched,
    so that merging twice is merging once.
    """
    merged = {each.type: each for each in conditions}
    for change in changes:
        known = merged.get(change.type)
        moved = known is None or known.status != change.status
        filled = change.model_copy(
            update={
                "last_transition_time_us": now_us
                if known is None or moved
                else known.last_transition_time_us,
                "observed_generation": generation,
            }
        )
        if known is None or not _same(known, filled):
            merged[change.type] = filled
    return list(merged.values())


def _same(known: Condition, filled: Condition) -> bool:
    return known == filled
