"""One look at one session: observe, plan, carry out, write the status, announce; until nothing is left to do.

The planner decides everything. A pass may end anywhere, by an error or with the process, and the next one
goes on from what is there: nothing is remembered between passes that matters.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from gristmill_contracts import conditions
from gristmill_contracts.errors import (
    ConflictError,
    GristmillError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from gristmill_contracts.resources import Condition
from gristmill_contracts.session import TrainingSession, TrainingSessionStatus
from gristmill_contracts.units import now_us
from gristmill_operator.budget import WriteBudget
from gristmill_operator.cluster import CachedCluster
from gristmill_operator.codec import session_from, status_patch
from gristmill_operator.kinds import PODS, SESSIONS, Kind
from gristmill_operator.problems import NotLeaderError
from gristmill_operator.seams import Hands, Json, Key, Observer, Recorder
from gristmill_sessions.events import SessionEvent, events_of
from gristmill_sessions.identity import session_uid
from gristmill_sessions.observed import Observed, Plan, Release
from gristmill_sessions.pace import may_wait_s
from gristmill_sessions.planner import INFORMATIVE, make_plan, next_status

logger = logging.getLogger(__name__)

STEPS_MAX: Final = 16
"""Plans of one session in one pass: more than any life needs, fewer than for ever. One that needs more is
undone by somebody as fast as it is done, and comes again with pauses."""
UNSETTLED_S: Final = 0.5
SOON_S: Final = 0.05
NOT_UNDERSTOOD: Final = "NotUnderstood"
STATUS: Final = "status"


Announce = Callable[
    [TrainingSessionStatus, TrainingSessionStatus, Plan, Observed], Iterable[SessionEvent]
]
"""What users are told of: status before and after, the plan, what was seen."""
Changed = Callable[[Json, TrainingSessionStatus, TrainingSessionStatus], None]
"""Told of each status written: the session, before, after."""


class StepFailedError(Exception):
    """An action failed; `cause` says how. The status was written all the same."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(slots=True, kw_only=True)
class SessionReconciler:
    cluster: CachedCluster
    observer: Observer
    hands: Hands
    recorder: Recorder
    budget: WriteBudget
    read: Callable[[Json], TrainingSession] = session_from
    plan: Callable[[Observed], Plan] = make_plan
    announce: Announce = events_of
    changed: Changed = lambda body, before, after: None
    announced: Callable[[str], None] = lambda reason: None
    """Told of the reason of each Event."""
    wrote: Callable[[bool], None] = lambda informative: None
    """Told of each status write: whether it only informed."""
    busy: Callable[[], bool] = lambda: False
    """Whether more waits to be done than is done now."""
    clock_us: Callable[[], int] = now_us
    errors: dict[Key, str] = field(default_factory=dict)
    """What went wrong when the last plan of a session was carried out."""

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until it should be looked at again though nothing changed; None = never.

        Raises GristmillError or OSError: to be tried again, with a pause for some of them.
        """
        if not await self.cluster.settle((key.namespace, key.name)):
            return UNSETTLED_S
        body = self._body(key)
        if body is None:
            self.forget(key)
            return None
        try:
            session = self.read(body)
        except InvalidRequestError as error:
            await self._refuse(body, error)
            return None
        return await self._steps(key, session)

    async def refresh(self, key: Key) -> None:
        """Read the session past the cache."""
        known = self._body(key)
        try:
            await self.cluster.get(SESSIONS, key.namespace, key.name)
        except NotFoundError:
            if known is not None:
                uid = known["metadata"]["uid"]
                self.cluster.cache.remove(SESSIONS, key.namespace, key.name, uid)

    def forget(self, key: Key) -> None:
        self.errors.pop(key, None)
        self.budget.forget(key)
        self.cluster.expectations.forget((key.namespace, key.name))

    async def _steps(self, key: Key, session: TrainingSession) -> float | None:
        await self.hands.keep_budgets(session)
        for _ in range(STEPS_MAX):
            observed = self.observer.observe(
                session, error=self.errors.get(key, ""), now_us=self.clock_us()
            )
            plan = self.plan(observed)
            body = self._body(key)
            failure = await self._carry_out(key, observed, plan)
            if Release() in plan.actions and failure is None:
                if body is not None:
                    self._tell(body, session.status, next_status(observed, plan), plan, observed)
                self.forget(key)
                return None
            body = self._body(key)
            if body is None or body["metadata"]["uid"] != session.metadata.uid:
                return SOON_S
            session = self.read(body)
            if plan.more and failure is None:
                continue
            if session.metadata.generation != observed.session.metadata.generation:
                # Somebody changed what is wanted: what was decided is of yesterday.
                return 0.0
            wrote, wait_s = await self._write(key, body, observed, plan)
            if failure is not None:
                raise StepFailedError(failure)
            if not plan.actions and not wrote:
                return _earliest(_seconds_until(plan.again_at_us, self.clock_us()), wait_s)
            if self.cluster.expectations.unseen((key.namespace, key.name)):
                return UNSETTLED_S
            session = self.read(self._body(key) or body)
        raise StepFailedError(
            UnavailableError(f"{key.namespace}/{key.name} found no rest in {STEPS_MAX} steps")
        )

    async def _carry_out(self, key: Key, observed: Observed, plan: Plan) -> Exception | None:
        """The error that an action ended with. A stale resource, or lost leadership, is raised."""
        for action in plan.actions:
            try:
                await self.hands.do(observed.session, action)
            except (ConflictError, NotLeaderError):
                raise
            except (GristmillError, OSError) as error:
                self._note(key, plan, error)
                return error
            self._log(observed.session, plan, action)
        if plan.actions:
            self.errors.pop(key, None)
        return None

    async def _write(
        self, key: Key, body: Json, observed: Observed, plan: Plan
    ) -> tuple[bool, float | None]:
        """Write the status that follows from the plan, if it says something new, and announce it.

        Returns whether it was written, and seconds after which what only informs may be; None = nothing
        is left to write.
        """
        status = next_status(observed, plan)
        patch = status_patch(body, status)
        if patch is None:
            return False, None
        before = self.read(body).status
        informative = patch[STATUS].keys() <= _INFORMATIVE
        if informative:
            wait_s = self.budget.wait_s(key)
        else:
            wait_s = may_wait_s(before, status, busy=self.busy()) - self.budget.since_s(key)
        if wait_s > 0:
            return False, wait_s
        await self.cluster.merge_patch(SESSIONS, key.namespace, key.name, patch, subresource=STATUS)
        self.budget.written(key)
        self.wrote(informative)
        if before.state != status.state:
            logger.info(
                "session_state",
                extra={
                    "session": session_uid(observed.session),
                    "session_name": key.name,
                    "namespace": key.namespace,
                    "before": before.state,
                    "state": status.state,
                },
            )
        self._tell(body, before, status, plan, observed)
        return True, None

    def _tell(
        self,
        body: Json,
        before: TrainingSessionStatus,
        after: TrainingSessionStatus,
        plan: Plan,
        observed: Observed,
    ) -> None:
        regarding = named(body)
        for each in self.announce(before, after, plan, observed):
            self.recorder.record(
                regarding,
                each.reason,
                each.message,
                warning=each.type == "Warning",
                action=_camel(plan.policy),
                related=self._pod(body, each.pod),
            )
            self.announced(each.reason)
        self.changed(body, before, after)

    async def _refuse(self, body: Json, error: InvalidRequestError) -> None:
        """A session that cannot be read, as of a newer version: say so in its conditions, once."""
        meta = body["metadata"]
        known: list[Json] = (body.get(STATUS) or {}).get("conditions") or []
        mine = conditions.ACCEPTED
        old = next((each for each in known if each["type"] == mine), None)
        if old is not None and (old.get("reason"), old.get("message")) == (
            NOT_UNDERSTOOD,
            error.message,
        ):
            return
        refusal = Condition(
            type=mine,
            status="False",
            reason=NOT_UNDERSTOOD,
            message=error.message,
            last_transition_time_us=self.clock_us(),
            observed_generation=meta.get("generation", 0),
        ).model_dump(mode="json", by_alias=True)
        patch: dict[str, Any] = {  # Any: JSON
            "metadata": {"resourceVersion": meta["resourceVersion"]},
            STATUS: {"conditions": [*(c for c in known if c["type"] != mine), refusal]},
        }
        await self.cluster.merge_patch(
            SESSIONS, meta["namespace"], meta["name"], patch, subresource=STATUS
        )
        self.recorder.record(named(body), NOT_UNDERSTOOD, error.message, warning=True)

    def _body(self, key: Key) -> Json | None:
        return self.cluster.cache.get(SESSIONS, key.namespace, key.name)

    def _pod(self, session: Json, name: str) -> Json | None:
        pod = self.cluster.cache.get(PODS, session["metadata"]["namespace"], name) if name else None
        return None if pod is None else named(pod, PODS)

    def _note(self, key: Key, plan: Plan, error: Exception) -> None:
        message = str(error)
        if self.errors.get(key) != message:
            extra = {"namespace": key.namespace, "session": key.name, "policy": plan.policy}
            logger.warning("session_action_failed", extra={**extra, "error": message})
        self.errors[key] = message

    def _log(self, session: TrainingSession, plan: Plan, action: object) -> None:
        logger.info(
            "session_action",
            extra={
                "session": session_uid(session),
                "session_name": session.metadata.name,
                "namespace": session.metadata.namespace,
                "policy": plan.policy,
                "action": type(action).__name__,
            },
        )


_INFORMATIVE: Final = frozenset(
    TrainingSessionStatus.model_fields[name].alias or name for name in INFORMATIVE
)


def named(body: Json, kind: Kind = SESSIONS) -> Json:
    """The object with apiVersion and kind, which the cache leaves out."""
    return {"apiVersion": kind.api_version, "kind": kind.kind, **body}


def _camel(policy: str) -> str:
    """An Event's action is one word of upper camel case."""
    return "".join(part.capitalize() for part in policy.split("_"))


def _seconds_until(time_us: int | None, now: int) -> float | None:
    return None if time_us is None else max(0.0, (time_us - now) / 1e6)


def _earliest(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)
