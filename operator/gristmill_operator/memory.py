"""What the operator did in this life and can read nowhere. Lost with the process: it is done again, and harms nothing."""

from dataclasses import dataclass, field

from gristmill_contracts.budgets import PutBudget
from gristmill_sessions.cluster import ApiFailure


@dataclass(slots=True, kw_only=True)
class Memory:
    """Written by the hands, read by the eyes. Sessions are known by the uid of their resource."""

    registered: set[str] = field(default_factory=set)
    """The ledger knows tenant and session."""
    budgets: dict[str, dict[str, PutBudget]] = field(default_factory=dict)
    """What the ledger was last told of the budgets of a session, by name."""
    refused: dict[str, ApiFailure] = field(default_factory=dict)
    """Why the last placement was refused."""
    directives: dict[str, int] = field(default_factory=dict)
    """The attempt that the ledger was told to stop."""
    placed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The attempt whose pods were made, and how many."""
    gaps: dict[str, int] = field(default_factory=dict)
    """The attempt whose lost usage the ledger has on record."""
    places: dict[str, int] = field(default_factory=dict)
    """Who was given a place in its tenant's maxRunning -> until when it is kept, microseconds since 1970."""
    nodes_missed: dict[str, int] = field(default_factory=dict)
    """Name of a node that is gone -> when that was first noticed, microseconds since 1970."""

    def forget(self, uid: str) -> None:
        """The session is gone."""
        self.registered.discard(uid)
        self.budgets.pop(uid, None)
        self.refused.pop(uid, None)
        self.directives.pop(uid, None)
        self.placed.pop(uid, None)
        self.gaps.pop(uid, None)
        self.places.pop(uid, None)
