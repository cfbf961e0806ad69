"""Planted bugs: one change of the real code each, which the simulator must catch.

A change is a replacement in the source of one function, so that it is always made in the code of today: where
that no longer holds the text, `plant` says so.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`where`: module:function or module:Class.method. `seed`: one that catches it, 0 = none known."""

    name: str
    where: str
    old: str
    new: str
    seed: int


MUTATIONS = (
    Mutation(
        name="a result is released before it is durable",
        where="gristmill_meter.session:Session.ended",
        old="record.terminal and record.settled_frame <= self.log.durable_number",
        new="record.terminal",
        seed=1,
    ),
    Mutation(
        name="a claim is answered before it is written",
        where="gristmill_meter.release:_release",
        old="await session.log.durable(record.claim_frame)",
        new="pass",
        seed=1,
    ),
    Mutation(
        name="a result is released without a claim",
        where="gristmill_meter.release:_release",
        old="session.write(frames.Claim(number=record.number, at_us=session.now_us()))",
        new="pass",
        seed=1,
    ),
    Mutation(
        name="a result whose claim ran out is released",
        where="gristmill_meter.release:_release",
        old='if record.claim == "expired":',
        new="if False:",
        seed=8,
    ),
    Mutation(
        name="a submit is answered before its INTENT is durable",
        where="gristmill_meter.intake:submit_operation",
        old="await session.log.durable(record.accepted_frame)",
        new="pass",
        seed=7,
    ),
    Mutation(
        name="tokens are flushed before their PROGRESS is durable",
        where="gristmill_meter.streams:TokenStream._flush",
        old="await session.log.durable(frame)",
        new="pass",
        seed=0,
    ),
    Mutation(
        name="log frames are not synced",
        where="gristmill_meter.log:SessionLog._write_frames",
        old="file.fsync()",
        new="pass",
        seed=1,
    ),
    Mutation(
        name="a new segment's name is not synced",
        where="gristmill_meter.log:SessionLog._begin_segment",
        old="self.disk.fsync_dir(self.folder)",
        new="pass",
        seed=1,
    ),
    Mutation(
        name="a torn tail stays in the log",
        where="gristmill_meter.log:SessionLog._resume_segment",
        old="self.disk.truncate(path, content.end)",
        new="pass",
        seed=16,
    ),
    Mutation(
        name="usage is posted before it is durable",
        where="gristmill_meter.poster:Poster._next_batch",
        old="frame > session.log.durable_number or ",
        new="",
        seed=1,
    ),
    Mutation(
        name="usage that a restored ledger lost is not sent again",
        where="gristmill_meter.session:Session.recall_events",
        old="self.state.events.extendleft(reversed(older))",
        new="pass",
        seed=19,
    ),
    Mutation(
        name="an operation that is sent again runs again",
        where="gristmill_contracts.admission:same_operation",
        old="if by_number.body_hash == submit.body_hash:",
        new='if by_number.state == "Completed":\n            return None\n        if by_number.body_hash == submit.body_hash:',
        seed=3,
    ),
    Mutation(
        name="a replay is billed",
        where="gristmill_meter.link:WorkerLink._feed_again",
        old="session.metrics.replayed.inc()",
        new='session.metrics.replayed.inc()\n    from gristmill_meter.state import _bill\n    _bill(session.state, record, "attempt", "completed")',
        seed=1,
    ),
    Mutation(
        name="the session's sum is set instead of added to",
        where="gristmill_meter.state:_bill",
        old="state.counts += record.counts",
        new="state.counts = record.counts",
        seed=1,
    ),
    Mutation(
        name="an event's id depends on when it is made",
        where="gristmill_meter.state:_bill",
        old="event_id=event_id(state.op_id(record), kind, n)",
        new="event_id=event_id(state.op_id(record), kind, n + __import__('time').time_ns() // 10**10)",
        seed=1,
    ),
    Mutation(
        name="a batch is acknowledged before it is committed",
        where="gristmill_ledger.database:Database._commit",
        old="started = time.monotonic()",
        new="started = time.monotonic()\n    from gristmill_testing.simulation.books import answer_early\n    answer_early()",
        seed=10,
    ),
    Mutation(
        name="duplicates are known for a while only",
        where="gristmill_ledger.events:_known_hashes",
        old="for event_id, digest in found}",
        new="for event_id, digest in list(found)[-1:]}",
        seed=1,
    ),
    Mutation(
        name="the cursor moves past a gap",
        where="gristmill_ledger.decisions:_check_place",
        old="if batch.first_seq > state.acked_seq + 1:",
        new="if False:",
        seed=0,
    ),
    Mutation(
        name="an older attempt is not fenced",
        where="gristmill_ledger.decisions:decide",
        old="fenced = batch.epoch < state.epoch or (attempt is not None and attempt < state.attempt)",
        new="fenced = False",
        seed=5,
    ),
    Mutation(
        name="two attempts may release at once",
        where="gristmill_ledger.release:_take",
        old="(table.c.attempt < attempt) & (table.c.until_us <= at_us)",
        new="table.c.attempt < attempt",
        seed=0,
    ),
    Mutation(
        name="the rest of a hold stays reserved for ever",
        where="gristmill_ledger.budgets.holds:resolve",
        old="changes.add(balance.period, balance.released(balance.rest))",
        new="pass",
        seed=2,
    ),
    Mutation(
        name="a lease is freed when its time runs out",
        where="gristmill_ledger.budgets.holds:suspend",
        old="Change(reserved=-balance.rest, suspense=balance.rest)",
        new="Change(reserved=-balance.rest)",
        seed=4,
    ),
    Mutation(
        name="what is posted is set instead of added to",
        where="gristmill_ledger.budgets.holds:Changes.add",
        old="change.posted += more.posted",
        new="change.posted = more.posted",
        seed=2,
    ),
    Mutation(
        name="a lease is spent twice",
        where="gristmill_meter.wallet:Wallet._hold",
        old="purse.free[budget] -= amount",
        new="pass",
        seed=30,
    ),
    Mutation(
        name="a lease is spent after its time",
        where="gristmill_meter.wallet:Purse.usable",
        old=" and now_us < self.expires_us",
        new="",
        seed=0,
    ),
    Mutation(
        name="the inbox is drained twice",
        where="gristmill_meter.decisions:on_taken",
        old='if submit.stream == "log" and number <= state.inbox_number:',
        new="if False:",
        seed=8,
    ),
    Mutation(
        name="the inbox is acknowledged before its operations are durable",
        where="gristmill_meter.inbox:Inbox._take",
        old="await session.log.durable(session.log.appended_number)",
        new="pass",
        seed=0,
    ),
)


@contextmanager
def plant(mutation: Mutation) -> Iterator[None]:
    """The bug is in the code for the length of the block. Raises ValueError where it cannot be made."""
    module_name, _, path = mutation.where.partition(":")
    module = import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    original = inspect.getattr_static(owner, name)
    changed = _changed(original, name, mutation)
    places = [(owner, name)]
    if owner is module:
        places += [
            (other, at)
            for other in list(sys.modules.values())
            if getattr(other, "__name__", "").startswith("gristmill_")
            for at, value in list(vars(other).items())
            if value is original and (other, at) != (owner, name)
        ]
    for place, at in places:
        setattr(place, at, changed)
    try:
        yield
    finally:
        for place, at in places:
            setattr(place, at, original)


def _changed(original: Any, name: str, mutation: Mutation) -> Any:
    function = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.where} holds {mutation.old!r} {source.count(mutation.old)} times, not once: "
            f"plant {mutation.name!r} anew"
        )
    found: dict[str, Any] = {}
    code = compile(source.replace(mutation.old, mutation.new), f"<{mutation.name}>", "exec")
    exec(code, function.__globals__, found)
    return found[name]
