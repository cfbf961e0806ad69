"""One session at a time: observe, plan, carry out, write the status; until nothing is left to do."""

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from gristmill_cli.local.actions import Hands
from gristmill_contracts.errors import ConflictError, GristmillError, NotFoundError
from gristmill_contracts.ids import SessionUid
from gristmill_contracts.session import TrainingSession
from gristmill_contracts.units import now_us
from gristmill_sessions.identity import session_uid
from gristmill_sessions.observed import Action, Observed, Plan, Release
from gristmill_sessions.planner import make_plan, next_status, write_is_due

logger = logging.getLogger(__name__)

STEPS_MAX: Final = 12
"""Plans of one session in one pass: more than any life needs, fewer than for ever."""
RETRY_S: Final = 0.5


@dataclass(slots=True, kw_only=True)
class Reconciler:
    hands: Hands
    written: dict[SessionUid, float] = field(default_factory=dict)
    """When the status was last written, by the monotonic clock."""

    async def reconcile(
        self, session: TrainingSession, models: Collection[str], suspended: Collection[str]
    ) -> float | None:
        """Seconds until the session should be looked at again though nothing changed; None = never."""
        for _ in range(STEPS_MAX):
            observed = self.hands.world.observe(
                session, now_us=now_us(), models=models, suspended=suspended
            )
            plan = make_plan(observed)
            try:
                failed = await self._carry_out(observed, plan)
                if Release() in plan.actions and not failed:
                    self.written.pop(session_uid(session), None)
                    return None
                session = await self._read_and_write_status(observed, plan)
            except (ConflictError, NotFoundError):
                # Somebody changed it meanwhile: look again at what is there now.
                return 0.0 if await self._exists(session) else None
            if failed:
                return RETRY_S
            if not plan.actions:
                return _seconds_until(plan.again_at_us)
        return RETRY_S

    async def _carry_out(self, observed: Observed, plan: Plan) -> bool:
        """True if an action failed; why is kept for the next plan. A stale resource is no failure."""
        uid = session_uid(observed.session)
        for action in plan.actions:
            try:
                await self._do(observed, plan, action)
            except (ConflictError, NotFoundError):
                raise
            except (GristmillError, OSError) as error:
                return self._note(uid, plan, str(error))
        if plan.actions:
            self.hands.world.errors.pop(uid, None)
        return False

    async def _do(self, observed: Observed, plan: Plan, action: Action) -> None:
        session = observed.session
        if isinstance(action, Release):
            # Earlier actions of the plan may have changed the resource.
            session = await self._read(session)
        await self.hands.do(session, action)
        logger.info(
            "session_action",
            extra={
                "session": session_uid(session),
                "session_name": session.metadata.name,
                "policy": plan.policy,
                "action": type(action).__name__,
            },
        )

    def _note(self, uid: SessionUid, plan: Plan, message: str) -> bool:
        if self.hands.world.errors.get(uid) != message:
            logger.warning(
                "session_action_failed",
                extra={"session": uid, "policy": plan.policy, "error": message},
            )
        self.hands.world.errors[uid] = message
        return True

    async def _read_and_write_status(self, observed: Observed, plan: Plan) -> TrainingSession:
        """The session as it is after the plan."""
        session = observed.session
        if plan.actions:
            session = await self._read(session)
        status = next_status(observed, plan)
        uid = session_uid(session)
        since_s = time.monotonic() - self.written.get(uid, float("-inf"))
        if not write_is_due(session.status, status, since_s):
            return session
        if session.status.state != status.state:
            logger.info(
                "session_state",
                extra={"session": uid, "before": session.status.state, "state": status.state},
            )
        self.written[uid] = time.monotonic()
        changed = session.model_copy(update={"status": status})
        return await asyncio.to_thread(self.hands.store.update_status, changed)

    async def _read(self, session: TrainingSession) -> TrainingSession:
        meta = session.metadata
        return await asyncio.to_thread(
            self.hands.store.get, TrainingSession, meta.namespace, meta.name
        )

    async def _exists(self, session: TrainingSession) -> bool:
        try:
            await self._read(session)
        except NotFoundError:
            return False
        return True


def _seconds_until(time_us: int | None) -> float | None:
    return None if time_us is None else max(0.0, (time_us - now_us()) / 1e6)
