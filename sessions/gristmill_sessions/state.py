"""The state of a training session: a pure function of its spec, deletion time and conditions.

The table of the states is normative, and its order is precedence: the first row that matches wins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gristmill_contracts import conditions as known
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import State, TrainingSession, TrainingSessionSpec

NO_PODS: Final = frozenset({"Creating", "CreationRefused", "NameTaken", "ApiUnavailable"})
"""Reasons of `PodsReady=False` that say that there are none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that a state may depend on."""

    spec: TrainingSessionSpec
    deletion_time_us: int | None
    conditions: Sequence[Condition]

    def true(self, type_: str) -> bool:
        return known.is_true(self.conditions, type_)

    @property
    def deleting(self) -> bool:
        return self.deletion_time_us is not None

    @property
    def deletion_failed(self) -> bool:
        deleted = known.find(self.conditions, known.DELETED)
        return (
            deleted is not None
            and deleted.status == "False"
            and deleted.reason in known.DELETION_ERRORS
        )

    @property
    def stopping(self) -> bool:
        """The spec asks for it, or an annotation did, which the condition remembers: a stop is for ever."""
        stopped = known.find(self.conditions, known.STOPPED)
        begun = stopped is not None and stopped.status == "False"
        return begun or self.spec.desired_state == "Stopped"

    @property
    def scheduled(self) -> bool:
        pods = known.find(self.conditions, known.PODS_READY)
        exist = pods is not None and pods.status != "Unknown" and pods.reason not in NO_PODS
        return self.true(known.QUOTA_RESERVED) and exist


TABLE: Final[tuple[tuple[State, Callable[[Facts], bool]], ...]] = (
    ("DeletionFailed", lambda facts: facts.deleting and facts.deletion_failed),
    ("Deleting", lambda facts: facts.deleting),
    ("Failed", lambda facts: facts.true(known.FAILED)),
    ("Expired", lambda facts: facts.true(known.EXPIRED)),
    ("Stopped", lambda facts: facts.true(known.STOPPED)),
    ("Stopping", lambda facts: facts.stopping),
    ("Blocked", lambda facts: facts.true(known.STARTED) and facts.true(known.BLOCKED)),
    ("Running", lambda facts: facts.true(known.STARTED)),
    ("Scheduled", lambda facts: facts.scheduled),
    ("Created", lambda _facts: True),
)


def derive_state(
    spec: TrainingSessionSpec, deletion_time_us: int | None, conditions: Sequence[Condition]
) -> State:
    """The first row of TABLE that matches; the last one always does."""
    facts = Facts(spec=spec, deletion_time_us=deletion_time_us, conditions=conditions)
    return next(state for state, matches in TABLE if matches(facts))


def state_of(session: TrainingSession) -> State:
    """What `status.state` should say now."""
    return derive_state(session.spec, session.metadata.deletion_time_us, session.status.conditions)
