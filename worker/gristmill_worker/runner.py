"""What the engine thread does: open sessions, run their operations, snapshot and close them.

Every method runs on the engine's one thread, one at a time.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from gristmill_contracts.errors import GristmillError, NotFoundError, ReplayDivergedError
from gristmill_contracts.http import (
    Execute,
    Executed,
    OpenedSession,
    OpenSession,
    Problem,
    Snapshotted,
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
from gristmill_worker.groups import Group, new_rows, prompt_tokens
from gristmill_worker.orders import Forget, Run, adoption
from gristmill_worker.prefixes import Owner, Prefixes
from gristmill_worker.problems import problem_of, translated
from gristmill_worker.room import Room
from gristmill_worker.sampler import Sampler
from gristmill_worker.scheduler import Capacity
from gristmill_worker.scoring import compute_logprobs
from gristmill_worker.session import Session, new_session
from gristmill_worker.stream import TokenStream
from gristmill_worker.tallies import Book
from gristmill_worker.team import Team
from gristmill_worker.together import SharedOperation, run_shared
from gristmill_worker.validate import check_operation
from gristmill_worker.writer import Writer

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
        room: Room | None = None,
        sampler: Sampler | None = None,
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
        self.writer = Writer()
        self.room = room
        self.sampler = sampler or Sampler(base, Capacity(), Prefixes(base, 0))
        self.tenants: dict[str, str] = {}

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
        self.tenants[uid] = request.tenant
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
        self.writer.wait()  # what is being written may be what we look for, or must drop
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
        self.writer.wait()  # a closed session's folder is the caller's to move or remove
        self.book.closed(uid)
        self.tenants.pop(uid, None)
        self.sampler.drop(uid, NotFoundError(f"session {uid} was closed while it sampled"))
        if self.sessions.pop(uid, None) is not None:
            self.team.tell(Forget(uid=uid))
        self.metrics.sessions.set(len(self.sessions))

    def snapshot(self, uid: str) -> "Future[Snapshotted]":
        """Copy the session as it is now; done once another thread has made the copy durable."""
        copied = snapshots.copy(self.base, self._session(uid))
        return self.writer.write(lambda: snapshots.write(self.disk, copied, self.snapshots_kept))

    def snapshot_all(self) -> None:
        """Before a planned stop: what the next process would else have to run again. Returns once durable."""
        self.writer.wait()
        for session in list(self.sessions.values()):
            known = snapshots.existing(self.disk, session.state_dir)
            if session.counters.applied == (known[0] if known else 0):
                continue
            try:
                copied = snapshots.copy(self.base, session)
                snapshots.write(self.disk, copied, self.snapshots_kept)
            except GristmillError as error:
                log.warning("last_snapshot_failed", extra={"error": error.message})

    def _share(self, session: Session) -> None:
        """Give the other ranks the session as it is now."""
        if not self.team.alone:
            self.team.tell(adoption(session))

    def execute(self, uid: str, call: Execute) -> Executed:
        """Run one operation. Raises NotFoundError or ConflictError where nothing was consumed."""
        session = self._session(uid)
        if isinstance(call.operation, Sample) and not call.skip:
            return self._sampled(uid, call)
        return self._consume(session, call, lambda: self._run(session, call))

    def _sampled(self, uid: str, call: Execute) -> Executed:
        """A sample from begin to end, for who has no other thread to wait in."""
        answers: list[Executed] = []
        self.begin(uid, call, answers.append)
        while not answers:
            self.sampler.turn()
        return answers[0]

    def begin(
        self,
        uid: str,
        call: Execute,
        done: Callable[[Executed], None],
        tokens: TokenStream | None = None,
    ) -> None:
        """Let a sample join the batch; `done` gets its answer. Raises NotFoundError.

        With `tokens`, its chunks go out as they come, and it ends early when nobody reads them.
        """
        session = self._session(uid)
        op = call.operation
        assert isinstance(op, Sample)

        def answer(outcome: SampleResult | Exception, seconds: float) -> None:
            error = self._problem(call, outcome) if isinstance(outcome, Exception) else None
            result = None if isinstance(outcome, Exception) else outcome
            # Counted before the last chunk leaves: whoever asks after it finds it counted.
            answered = self._answer(
                uid, call, result, error, seconds=seconds, check=None, stream=tokens is not None
            )
            if tokens is not None:
                _finish_stream(tokens, error)
            done(answered)

        try:
            check_operation(op, self.base.facts)
            if self.room is not None:
                self.room.check(op, session.adapter.rank)
            self.sampler.add(self._group(uid, op, answer, tokens))
        except Exception as raised:  # noqa: BLE001 - whoever waits gets it
            answer(raised, 0.0)

    def _group(
        self,
        uid: str,
        op: Sample,
        answer: Callable[[SampleResult | Exception, float], None],
        tokens: TokenStream | None,
    ) -> Group:
        prompt = prompt_tokens(self.base, op)
        owner = Owner(
            tenant=self.tenants.get(uid, ""),
            revision=self.base.facts.revision,
            adapter="" if op.adapter is None else str(op.adapter.id),
        )
        return Group(
            uid=uid, op=op, owner=owner, prompt=prompt, rows=new_rows(self.base, op),
            adapter=None if op.adapter is None else self.checkpoints.adapter(op.adapter),
            length_max=min(op.params.max_tokens, self.base.facts.context_length - len(prompt)),
            done=answer, watch=None if tokens is None else tokens.watch,
        )  # fmt: skip

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
    ) -> Executed:
        trains = isinstance(call.operation, TrainOperation)
        if trains:
            session.expect(call.index)
        started = time.monotonic()
        result, error, check = None, None, None
        try:
            if not call.skip:
                check_operation(call.operation, self.base.facts)
                if self.room is not None and not call.replay:  # in replay it is known to fit
                    self.room.check(call.operation, session.adapter.rank)
                result = work()
            if result is not None and isinstance(call.operation, OptimStep | LoadState):
                check = session.checksum()
                self._compare(call, check)
        except Exception as raised:  # noqa: BLE001 - whoever waits gets it
            result, error = None, self._problem(call, raised)
        if trains:
            session.counters.applied += 1
        return self._answer(
            session.uid, call, result, error, seconds=time.monotonic() - started, check=check
        )

    @staticmethod
    def _problem(call: Execute, raised: Exception) -> Problem:
        failure = translated(raised)
        if type(failure) is GristmillError:
            log.error("operation_crashed", extra={"op_id": call.op_id}, exc_info=raised)
        return problem_of(failure)

    def _answer(
        self,
        uid: str,
        call: Execute,
        result: Result | None,
        error: Problem | None,
        *,
        seconds: float,
        check: int | None,
        stream: bool = False,
    ) -> Executed:
        """Count what ran, once, and tell it."""
        self.metrics.count(
            call.operation, result, failed=error is not None, replay=call.replay, seconds=seconds
        )
        wall_us = int(seconds * 1e6)
        self.book.ran(uid, call, result, wall_us, stream=stream)
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
        adapter = None if op.adapter is None else self.checkpoints.adapter(op.adapter)
        if isinstance(op, ComputeLogprobs):
            return compute_logprobs(self.base, adapter, op)
        return Empty()


def _finish_stream(tokens: TokenStream, error: Problem | None) -> None:
    try:
        tokens.finish(error)
    except Exception:  # its reader's trouble; the samples beside it go on
        log.exception("stream_not_finished")
