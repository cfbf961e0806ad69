"""Faults that wait for their moment: just when something was promised, and nothing has followed from it yet."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

RELEASED = "released"
"""A meter let a result go."""
INBOX_ACK = "inbox_ack"
"""A meter's word that the inbox's operations are in its log reaches the ledger."""
BATCH = "/v1/usage/batches"
PRODUCER = "/v1/producers"
LEASE = "/v1/leases"
INBOX = "/inbox"
ANSWERED = (BATCH, BATCH, PRODUCER, LEASE, INBOX, INBOX)
"""Ends of paths: the ledger answered that it has done what was asked. Some are chosen more often."""

Act = Callable[[str], None]
"""What happens to which session."""


@dataclass(slots=True)
class Traps:
    """`arm` one, and the next to come to the moment falls into it."""

    _armed: dict[str, list[Act]] = field(default_factory=lambda: defaultdict(list))

    def arm(self, moment: str, act: Act) -> None:
        self._armed[moment].append(act)

    def spring(self, moment: str, uid: str) -> bool:
        """True if one was there. A moment is named by itself, or by how the path ends that was called."""
        for name, waiting in self._armed.items():
            if waiting and moment.endswith(name):
                waiting.pop(0)(uid)
                return True
        return False

    def clear(self) -> None:
        self._armed.clear()
