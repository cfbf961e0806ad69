"""Reconciliation at the end of a run: worker, log and ledger say the same of every session, to the token."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from sqlalchemy import Connection

from gristmill_ledger.reconcile.compare import WAIT_US, Difference, judge
from gristmill_ledger.reconcile.sources import Scope, beats_after, own_differences, session_of


def unequal(connection: Connection, sessions: AbstractSet[str], *, restored: bool) -> Iterator[str]:
    """What `gristmill reconcile` would show of these sessions, in words. Nothing is under way any more.

    Not looked at: the holds of a ledger that came back from a backup. What was returned since then is held again, in
    suspense, until its session closes.
    """
    told = set()
    for beat in beats_after(connection, ""):
        session = session_of(connection, beat)
        if session is None or session.uid not in sessions:
            continue
        told.add(session.uid)
        # Long after: what the ledger does not have by then will never come.
        yield from map(_words, judge(session, session.told_us + WAIT_US + 1).differences)
    for uid in sorted(sessions - told):
        yield f"the meter of {uid[:4]} told nothing to reconcile"
    if restored:
        return
    for found in own_differences(connection, Scope()):
        if found.session in sessions:
            yield _words(found)


def _words(found: Difference) -> str:
    return f"{found.session[:4]} differs ({found.pair}, {found.kind}) in {found.subject}: {found.detail}"
