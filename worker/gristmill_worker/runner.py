"""What the engine thread does: open sessions, run their operations, snapshot and close them.

Every method runs on the engine's one thread, one at a time.
"""

import logging
import time
from collections.abc import Callable

from gristmill_contracts.errors import GristmillError, NotFoundError, ReplayDivergedError
from gristmill_contracts.http import (
    Execute,
    Executed,
    OpenedSession,
    OpenSession,
    Snapshotted,
    StreamChunk,
)
from gristmill_contracts.operations import (
    ComputeLogprobs,
    Empty,
    LoadState,
    LoadWeightsForSampling,
    Operation,
    OptimStep,
    Result,
    Sample,
    SampleResult,
    SaveResult,
    SaveState,
    SaveWeights,
    TrainOperation,
)
from gristmill_worker import snapshots
from gristmill_worker.base_model import BaseModel
from gristmill_worker.checkpoints import Checkpoints
from gristmill_worker.counters import WorkerMetrics
from gristmill_worker.disk import Disk
from gristmill_worker.orders import Forget, Run, adoption
from gristmill_worker.problems import problem_of, translated
from gristmill_worker.sampler import sample
from gristmill_worker.scoring import compute_logprobs
from gristmill_worker.session import Session, new_session
from gristmill_worker.stream import TokenStream
from gristmill_worker.tallies import Book
from gristmill_worker.team import Team
from gristmill_worker.together import SharedOperation, run_shared
from gristmill_worker.validate import check_operation

log = logging.getLogger(__name__)


class Runner:
    """The sessions of one worker, over one base model."""

    def __init__(
        self,
        *,
        base: BaseModel,
        disk: Disk,
        checkpoints: Checkpoints,
        metrics: WorkerMetrics,
        fingerprint: str,
        boot_id: str,
        token_budget: int,
        snapshots_kept: int,
        team: Team | None = None,
    ) -> None:
        self.base = base
        self.disk = disk
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.fingerprint = fingerprint
        self.boot_id = boot_id
        self.token_budget = token_budget
        self.snapshots_kept = snapshots_kept
        self.team = team or Team()
        self.sessions: dict[str, Session] = {}
        self.book = Book()

    def applied(self) -> dict[str, int]:
        """Session uid -> applied. The one method that other threads may call."""
        return {uid: session.counters.applied for uid, session in list(self.sessions.items())}

    @property
    def devices(self) -> int:
        """Accelerators that the ranks hold; 0 = they run on the CPU."""
        return self.team.world if self.base.device.type == "cuda" else 0

    def open(self, uid: str, request: OpenSession) -> OpenedSession:
        """The live session, or its newest usable snapshot, or a fresh adapter."""
        session = self.sessions.get(uid)
        bound = request.applied_max
        if session is None or (bound is not None and session.counters.applied > bound):
            session = self._restored(uid, request)
            self.sessions[uid] = session
            self._share(session)
            self.metrics.sessions.set(len(self.sessions))
        return OpenedSession(
            applied=session.counters.applied,
            rank=session.adapter.rank,
            alpha=session.adapter.alpha,
            fingerprint=self.fingerprint,
            boot_id=self.boot_id,
            checksum=session.checksum(),
            opening=self.book.opened(uid),
        )

    def _restored(self, uid: str, request: OpenSession) -> Session:
        state_dir = request.state_dir
        snapshots.drop_useless(self.disk, state_dir, request.applied_max)
        session = snapshots.restore(self.disk, self.base, uid, state_dir)
        if session is not None:
            log.info("session_restored", extra={"applied": session.counters.applied})
            return session
        return new_session(
            self.base, uid=uid, state_dir=state_dir, seed=request.seed,
            rank=request.rank, alpha=request.alpha,
        )  # fmt: skip

    def close(self, uid: str) -> None:
        """Forget a session; its snapshots stay. Closing an unknown one is no error."""
        self.book.closed(uid)
        if self.sessions.pop(uid, None) is not None:
            self.team.tell(Forget(uid=uid))
        self.metrics.sessions.set(len(self.sessions))

    def snapshot(self, uid: str) -> Snapshotted:
        return snapshots.take(self.disk, self.base, self._session(uid), self.snapshots_kept)

    def snapshot_all(self) -> None:
        """Before a planned stop: what the next process would else have to run again."""
        for session in list(self.sessions.values()):
            known = snapshots.existing(self.disk, session.state_dir)
            if session.counters.applied == (known[0] if known else 0):
                continue
            try:
                snapshots.take(self.disk, self.base, session, self.snapshots_kept)
            except GristmillError as error:
                log.warning("last_snapshot_failed", extra={"error": error.message})

    def _share(self, session: Session) -> None:
        """Give the other ranks the session as it is now."""
        if not self.team.alone:
            self.team.tell(adoption(session))

    def execute(self, uid: str, call: Execute) -> Executed:
        """Run one operation. Raises NotFoundError or ConflictError where nothing was consumed."""
        session = self._session(uid)
        return self._consume(session, call, lambda: self._run(session, call))

    def stream(self, uid: str, call: Execute, emit: Callable[[StreamChunk], bool]) -> None:
        """Run a sample and emit its chunks as they come; `emit` returns False to end it early."""
        session = self._session(uid)
        tokens = TokenStream(self.base, call.operation, emit)
        executed = self._consume(
            session, call, lambda: self._sample(tokens.operation, tokens), stream=True
        )
        tokens.finish(executed.error)

    def _session(self, uid: str) -> Session:
        session = self.sessions.get(uid)
        if session is None:
            raise NotFoundError(f"session {uid} is not open in this worker; open it first")
        return session

    def _consume(
        self,
        session: Session,
        call: Execute,
        work: Callable[[], Result | None],
        *,
        stream: bool = False,
    ) -> Executed:
        trains = isinstance(call.operation, TrainOperation)
        if trains:
            session.expect(call.index)
        started = time.monotonic()
        result, error, check = None, None, None
        try:
            if not call.skip:
                check_operation(call.operation, self.base.facts)
                result = work()
            if result is not None and isinstance(call.operation, OptimStep | LoadState):
                check = session.checksum()
                self._compare(call, check)
        except Exception as raised:
            failure = translated(raised)
            if type(failure) is GristmillError:
                log.exception("operation_crashed", extra={"op_id": call.op_id})
            result, error = None, problem_of(failure)
        if trains:
            session.counters.applied += 1
        seconds = time.monotonic() - started
        self.metrics.count(
            call.operation, result, failed=error is not None, replay=call.replay, seconds=seconds
        )
        wall_us = int(seconds * 1e6)
        self.book.ran(session.uid, call, result, wall_us, stream=stream)
        return Executed(
            result=result, error=error, checksum=check, fingerprint=self.fingerprint,
            wall_us=wall_us,
        )  # fmt: skip

    def _compare(self, call: Execute, check: int) -> None:
        if call.expected_checksum is None or call.expected_fingerprint != self.fingerprint:
            return
        if check != call.expected_checksum:
            raise ReplayDivergedError(
                f"{call.op_id}: checksum {check} on replay but {call.expected_checksum} at first, "
                f"on the same fingerprint {self.fingerprint}"
            )

    def _run(self, session: Session, call: Execute) -> Result | None:
        op: Operation = call.operation
        if isinstance(op, SharedOperation):
            self.team.tell(Run(uid=session.uid, call=call))
            return run_shared(self.base, self.team, session, op, self.token_budget)
        if isinstance(op, SaveWeights | SaveState):
            return self._save(session, call, op)
        if isinstance(op, LoadState):
            loaded = self.checkpoints.load_state(session, op)
            self._share(session)
            return loaded
        return self._run_sampling(op)

    def _save(
        self, session: Session, call: Execute, op: SaveWeights | SaveState
    ) -> SaveResult | None:
        return None if call.replay else self.checkpoints.save(session, op, call.op_id)

    def _run_sampling(self, op: Sample | ComputeLogprobs | LoadWeightsForSampling) -> Result:
        if isinstance(op, Sample):
            return self._sample(op, None)
        adapter = None if op.adapter is None else self.checkpoints.adapter(op.adapter)
        if isinstance(op, ComputeLogprobs):
            return compute_logprobs(self.base, adapter, op)
        return Empty()

    def _sample(self, op: Sample, tokens: TokenStream | None) -> SampleResult:
        adapter = None if op.adapter is None else self.checkpoints.adapter(op.adapter)
        return sample(self.base, adapter, op, None if tokens is None else tokens.watch)
