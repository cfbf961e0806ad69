"""The operations that all ranks of a team run at the same time, each its share. Same code on every rank."""

from gristmill_contracts.errors import ReplayDivergedError
from gristmill_contracts.operations import (
    Forward,
    ForwardBackward,
    ForwardResult,
    OptimStep,
    OptimStepResult,
)
from gristmill_worker import train
from gristmill_worker.base_model import BaseModel
from gristmill_worker.session import Session
from gristmill_worker.team import Team

SharedOperation = Forward | ForwardBackward | OptimStep


def run_shared(
    base: BaseModel, team: Team, session: Session, op: SharedOperation, token_budget: int
) -> ForwardResult | OptimStepResult:
    """The whole operation's result, the same on every rank; or the same error on every rank."""
    if isinstance(op, Forward):
        return train.forward(base, session.adapter, op, token_budget, team)
    if isinstance(op, ForwardBackward):
        with session.scratch() as scratch:
            result, _ = train.forward_backward(
                base, session.adapter, op, token_budget, team, scratch=scratch
            )
        session.accumulate(op, scratch)
        return result
    stepped = session.optim_step(op, base.spares)
    if not team.alone:
        _agree(team, session)
    return stepped


def _agree(team: Team, session: Session) -> None:
    sums = team.gather(session.checksum())
    if len(set(sums)) > 1:
        raise ReplayDivergedError(
            f"session {session.uid}: the ranks disagree after step {session.counters.step}: their "
            f"checksums are {sums}; the ranks must run the same image on the same kind of device"
        )
