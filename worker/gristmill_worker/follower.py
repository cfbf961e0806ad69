"""Ranks other than 0: no door of their own, they do what rank 0 says until it says finish."""

import logging
import os
import signal
import threading
from pathlib import Path

from gristmill_contracts.errors import GristmillError
from gristmill_worker.base_model import BaseModel
from gristmill_worker.orders import Adopt, Finish, Forget, Lend, Order, Run, adopted
from gristmill_worker.session import Session
from gristmill_worker.team import Team
from gristmill_worker.together import SharedOperation, run_shared

log = logging.getLogger(__name__)


class Follower:
    """Sessions by uid, in the state that rank 0's have."""

    def __init__(
        self, *, base: BaseModel, team: Team, token_budget: int, idle: threading.Event
    ) -> None:
        self.base = base
        self.team = team
        self.token_budget = token_budget
        self.sessions: dict[str, Session] = {}
        self.idle = idle
        """Set while no operation runs."""

    def follow(self) -> None:
        """Returns at Finish; raises TeamLostError when rank 0, or another one, is gone."""
        while True:
            self.idle.set()
            order = self.team.hear()
            self.idle.clear()
            if isinstance(order, Finish):
                return
            self.obey(order)

    def obey(self, order: Order) -> None:
        if isinstance(order, Adopt):
            self.sessions[order.uid] = adopted(self.base, order)
        elif isinstance(order, Forget):
            self.sessions.pop(order.uid, None)
        elif isinstance(order, Run):
            self._run(order)
        elif isinstance(order, Lend):
            assert self.base.shards is not None
            with self.base.shards.together(1, trains=False):
                pass

    def _run(self, order: Run) -> None:
        op = order.call.operation
        assert isinstance(op, SharedOperation)
        try:
            run_shared(self.base, self.team, self.sessions[order.uid], op, self.token_budget)
        except GristmillError as error:
            # Every rank has the same error; rank 0 answers with it.
            log.info(
                "shared_operation_failed", extra={"op_id": order.call.op_id, "code": error.code}
            )


def end_at_sigterm(idle: threading.Event, grace_s: float) -> None:
    """End with status 0 at SIGTERM, once no operation runs. Call before any other thread starts.

    The main thread waits inside a collective, where Python runs no signal handler.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        idle.wait(grace_s)
        logging.shutdown()
        os._exit(0)

    threading.Thread(target=wait, name="sigterm", daemon=True).start()


def tell_ready(path: Path | None) -> None:
    """Make the file that a readiness probe looks for."""
    if path is not None:
        path.touch(mode=0o600)
