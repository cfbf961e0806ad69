"""What is held against the ledger: it knows what each client holds, and what every operation must cost."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from gristmill_contracts import operations as ops
from gristmill_contracts.http import OperationView, Problem, StreamChunk, UsageBatch
from gristmill_contracts.ids import OpId, SessionUid
from gristmill_contracts.usage import TOKEN_TYPES, Counts
from gristmill_meter.ports import ExecuteCall
from gristmill_testing.chains import broken_chains
from gristmill_testing.fake_worker import FakeWorker, Weights, prompt_tokens, sample_tokens
from gristmill_testing.simulation.client import ClientOp
from gristmill_testing.simulation.reconciled import unequal
from gristmill_testing.simulation.sums import wrong_sums

if TYPE_CHECKING:
    from gristmill_testing.simulation.pods import Pod
    from gristmill_testing.simulation.world import World

PARTS = ("posted", "late_posted", "reserved", "suspense")
PERIODS = f"SELECT budget, limit_amount, {', '.join(PARTS)} FROM budget_period"
_views = msgspec.msgpack.Decoder(OperationView)


class Audit:
    """Collects what was seen during a run, and judges it at its end. `violations`: what was broken."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.violations: list[str] = []
        self._judging = False
        self._released: dict[str, int] = {}

    def fail(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)
            self.world.loop.broken = not self._judging
            self.world.note("VIOLATION", what)

    # --- during the run --------------------------------------------------------------------------

    def accepted(self, op: ClientOp) -> None:
        self.world.note("accepted", op.uid[:4], op.stream, op.number, op.operation_id)

    def refused(self, op: ClientOp, problem: Problem) -> None:
        self.world.note("refused", op.uid[:4], op.stream, op.number, problem.code, problem.message)
        op.refusal = problem
        if op.uid in self.world.keeper.lost or op.uid in self.world.cut_short:
            return
        if problem.code == "not_found" and op.operation_id:
            op.gone = True
            if self._was_in_a_lost_inbox(op):
                # It will never run, and nobody bills it: its client hears of it, and ends the session.
                self.world.cut_short.add(op.uid)
                self.world.keeper.stop(op.uid)
                return
        self.fail(f"{_name(op)} was refused: {problem.code}: {problem.message}")

    def _was_in_a_lost_inbox(self, op: ClientOp) -> bool:
        """A ledger from a backup has no inbox but the one of then."""
        return self.world.books.restored and any(
            (uid, stream) == (op.uid, op.stream) and op.number in (None, number)
            for uid, stream, number in self.world.books.inboxed
        )

    def broken(self, op: ClientOp, problem: Problem) -> None:
        if op.uid not in self.world.keeper.lost:
            self.fail(f"{_name(op)} met a bug: {problem.message}")

    def held(self, op: ClientOp, view: OperationView) -> None:
        """A client got an operation's end."""
        self.world.note("held", op.uid[:4], view.stream, view.number, view.state)
        op.number = view.number
        if op.view is None:
            op.view = view
        elif msgspec.msgpack.encode(op.view) != msgspec.msgpack.encode(view):
            self.fail(f"{_name(op)} was told as {op.view.state}, then as {view.state} {view.error}")

    def chunk(self, op: ClientOp, chunk: StreamChunk) -> None:
        self.world.note("chunk", op.uid[:4], chunk.number, len(chunk.tokens), chunk.final)
        op.number = chunk.number
        op.tokens += chunk.tokens
        op.final = chunk.final is not None

    def released(self, pod: "Pod", uid: str, body: bytes) -> bool:
        """A meter answers for an operation; whether that is a result that it lets go.

        Point 1: behind a durable record of its tokens. And none lets go once a later attempt has begun to.
        """
        try:
            view = _views.decode(body)
        except msgspec.MsgspecError:
            return False  # A problem.
        if view.state != "Completed":
            return False
        attempt = pod.assigned[SessionUid(uid)].attempt
        newest = self._released.get(uid, 0)
        self._released[uid] = max(newest, attempt)
        if uid in self.world.keeper.lost:
            return True
        if attempt < newest:
            self.fail(
                f"attempt {attempt} of {uid[:4]} released a result after attempt {newest} had"
            )
        log = pod.volume.durable_log(SessionUid(uid))
        if not log.may_leave((view.stream, view.number)):
            self.fail(
                f"{uid[:4]}/{view.stream}/{view.number} left before the record of its tokens was durable"
            )
        return True

    def posted(self, uid: str, batch: UsageBatch) -> None:
        """Usage reaches the ledger: it is behind a durable record, too."""
        if uid in self.world.keeper.lost:
            return
        log = self.world.keeper.pods[SessionUid(uid)].volume.durable_log(SessionUid(uid))
        for event in batch.events:
            if not log.bills(event):
                self.fail(
                    f"{uid[:4]}/{event.stream}/{event.number} was posted before its record was durable"
                )

    def restored(self) -> None:
        """A ledger from a backup knows nothing of what came after it."""
        self.world.books.newest.clear()
        self._released.clear()

    def unfenced(self, uid: str, attempt: int) -> None:
        self.fail(f"attempt {attempt} of {uid[:4]} posted usage and was not told that it is over")

    def committed(self) -> None:
        """Point 7, I4: at no moment is more than the limit of a hard budget posted, held or in suspense."""
        books = self.world.books
        if books.restored or self.world.plan.budget is None:
            return
        for budget, limit, *used in books.raw.execute(PERIODS):
            if sum(used) > limit:
                self.fail(f"budget {budget} of {limit} has {dict(zip(PARTS, used, strict=True))}")

    def nothing_is_held(self) -> bool:
        """Once all sessions are closed and shipped."""
        if self.world.books.restored or self.world.keeper.lost:
            return True
        rows = self.world.books.rows("budget_period")
        return all(row["reserved"] == row["suspense"] == 0 for row in rows)

    def _check_budgets(self, rows: list[dict[str, Any]]) -> None:
        """What is posted is what was used."""
        if self.world.books.restored or self.world.keeper.lost:
            return
        spent: Counter[str] = Counter()
        for row in rows:
            if row["kind"] == "usage":
                spent[row["tenant"]] += counts_of(row).total
        for period in self.world.books.rows("budget_period"):
            tenant, posted = (
                period["budget"].split("/")[0],
                period["posted"] + period["late_posted"],
            )
            if posted != spent[tenant]:
                self.fail(
                    f"budget of {tenant} has {posted} posted, its rows sum to {spent[tenant]}"
                )

    def _check_leases(self, rows: list[dict[str, Any]]) -> None:
        """Nothing is begun off a lease that the ledger has taken for over."""
        if self.world.books.restored:
            return
        over = {
            row["lease"]: row["at_us"]
            for row in self.world.books.rows("reservation_suspense")
            if row["reason"] == "expired"
        }
        for row in rows:
            if row["op_start_us"] > over.get(row["lease"], row["op_start_us"]):
                self.fail(
                    f"{row['session'][:4]}/{row['stream']}/{row['number']} began off a lease whose "
                    "time had run out"
                )

    # --- at the end ------------------------------------------------------------------------------

    def judge(self) -> None:
        """Everything that is broken, not only the first of it."""
        self._judging = True
        rows = self.world.books.rows("usage_event")
        self._check_sequences(rows)
        self._check_oddities(rows)
        self._check_budgets(rows)
        self._check_leases(rows)
        for wrong in wrong_sums(self.world.books.rows):
            self.fail(wrong)
        self._check_reconciliation()
        by_op: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            by_op[row["session"], row["stream"], row["number"]].append(row)
        gaps = {row["session"] for row in self.world.books.rows("usage_gap")}
        for client in self.world.clients:
            lost = client.uid in self.world.keeper.lost
            for op in client.operations:
                self._check_op(op, by_op, client.uid in gaps, lost)
            if lost:
                continue
            self._check_rows(client.uid, client.operations, by_op)
            self._check_numbers(client.operations)
            self._check_views(client.uid, rows)
        for uid in self.world.keeper.lost:
            if uid not in gaps:
                self.fail(f"session {uid[:4]} lost its volume, and no gap is on record")

    def _check_reconciliation(self) -> None:
        """Worker = log = ledger. Of a volume that was lost nobody knows what its log held."""
        books, alive = self.world.books, set(self.world.names) - set(self.world.keeper.lost)
        with books.look() as connection:
            for wrong in unequal(connection, alive, restored=books.restored):
                self.fail(wrong)

    def _check_sequences(self, rows: list[dict[str, Any]]) -> None:
        """I2, I3: gapless, and each event once."""
        heads = {row["tenant"]: row["seq"] for row in self.world.books.rows("tenant_head")}
        seqs: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            seqs[row["tenant"]].append(row["seq"])
        for tenant, found in seqs.items():
            if sorted(found) != list(range(1, len(found) + 1)) or heads[tenant] != len(found):
                self.fail(f"sequence of {tenant} is {found}, its head {heads.get(tenant)}")
        with self.world.books.look() as connection:
            for fault in broken_chains(connection):
                self.fail(f"the chain is broken: {fault}")
        doubled = [key for key, n in Counter(row["event_id"] for row in rows).items() if n > 1]
        if doubled:
            self.fail(f"events stored twice: {doubled}")

    def _check_oddities(self, rows: list[dict[str, Any]]) -> None:
        for row in self.world.books.rows("dead_letter"):
            if row["producer"] not in self.world.keeper.lost:
                self.fail(f"dead letter of {row['producer'][:4]}: event {row['event_id']}")
        for row in rows:
            odd = set((row["quarantined"] or "").split(",")) - {
                "",
                "fenced_attempt",
                "unknown_session",
            }
            if odd:
                self.fail(f"row {row['seq']} is quarantined: {row['quarantined']}")
            if row["corrects"] or row["completeness"] != "final":
                self.fail(f"row {row['seq']} is no plain usage")

    def _check_op(
        self, op: ClientOp, by_op: dict[Any, list[dict[str, Any]]], gap: bool, lost: bool
    ) -> None:
        """Points 1, 2 and 5: what a client holds is billed once; what failed is not billed."""
        if op.number is None or op.refused_number:
            return
        rows = by_op.get((op.uid, op.stream, op.number), [])
        usage = [row for row in rows if row["kind"] == "usage"]
        if op.streamed:
            self._check_stream(op, usage, gap=gap, lost=lost)
        elif op.view is None:
            return
        elif op.view.state != "Completed":
            if usage and not lost:
                self.fail(f"{_name(op)} was told as {op.view.state} and is billed")
        elif len(usage) != 1:
            if not (lost and gap):
                self.fail(f"{_name(op)} is held by its client and has {len(usage)} usage rows")
        elif not lost:
            self._check_bill(op, rows, usage[0], op.view.counts)

    def _check_bill(
        self, op: ClientOp, rows: list[dict[str, Any]], row: dict[str, Any], told: Counts | None
    ) -> None:
        expected = expected_counts(op.operation)
        if counts_of(row) != expected or told != expected:
            self.fail(f"{_name(op)} cost {counts_of(row)}, told {told}, not {expected}")
        if row["outcome"] != "completed" or len(rows) != 1:
            self.fail(f"{_name(op)} completed and has rows {[r['kind'] for r in rows]}")

    def _check_stream(
        self, op: ClientOp, usage: list[dict[str, Any]], *, gap: bool, lost: bool
    ) -> None:
        """What left is billed: all of it, and nothing that was not durable."""
        if not op.tokens:
            return
        assert isinstance(op.operation, ops.Sample)
        if len(usage) != 1:
            if not (lost and gap):
                self.fail(
                    f"{_name(op)} streamed {len(op.tokens)} tokens and has {len(usage)} usage rows"
                )
            return
        if lost:
            return
        whole = sample_tokens(op.operation, 0)
        if op.tokens != whole[: len(op.tokens)]:
            self.fail(f"{_name(op)} streamed other tokens than it should")
        counts = counts_of(usage[0])
        if counts.prefill != prompt_tokens(op.operation) or counts.sample > len(whole):
            self.fail(f"{_name(op)} cost {counts}")
        if counts.sample < len(op.tokens) or (op.final and counts.sample != len(op.tokens)):
            self.fail(f"{_name(op)} streamed {len(op.tokens)} tokens, billed {counts.sample}")

    def _check_rows(
        self, uid: SessionUid, known: list[ClientOp], by_op: dict[Any, list[dict[str, Any]]]
    ) -> None:
        """Points 3 and 5, I1: one row for an operation; usage was fetched, or could be to the end."""
        ops_of = {(op.stream, op.number): op for op in known if op.number is not None}
        streams = self.world.streams_of(uid)
        for (session, stream, number), rows in by_op.items():
            if session != uid:
                continue
            if len(rows) != 1:
                self.fail(
                    f"{uid[:4]}/{stream}/{number} has {len(rows)} rows: {[r['kind'] for r in rows]}"
                )
            op, row = ops_of.get((stream, number)), rows[0]
            if stream == "train" and op is None:
                self.fail(f"{uid[:4]}/{stream}/{number} is billed, and nobody asked for it")
            known_to_nobody = stream == "log" and number not in streams and op is None
            kept = number in self.world.fetchable.get(uid, set())
            if row["kind"] == "usage" and known_to_nobody and not kept:
                self.fail(f"{uid[:4]}/log/{number} is billed, and nobody could fetch it")

    def _check_numbers(self, known: list[ClientOp]) -> None:
        """Point 8, and 6: as if every completed operation had run once, in order, without a fault."""
        worker, state = FakeWorker(), Weights()
        train = sorted((op for op in known if op.stream == "train"), key=lambda op: op.number or 0)
        for op in train:
            if op.refused_number:
                continue
            if op.view is None or op.view.state != "Completed":
                if op.uid not in self.world.cut_short:
                    told = op.view.state if op.view else "nothing"
                    self.fail(f"{_name(op)} was told as {told}")
                return
            name = str(OpId(op.uid, "train", op.number or 0))
            call = ExecuteCall(index=1, op_id=name, operation=msgspec.Raw(b""))
            state, expected = worker._compute(state, call, op.operation)
            if not _same_result(expected, op.view.result):
                self.fail(f"{_name(op)} gave {op.view.result}, not {expected}")
                return

    def _check_views(self, uid: SessionUid, rows: list[dict[str, Any]]) -> None:
        """The session's own sum is that of its rows."""
        view = self.world.last_view(uid)
        if view is None:
            return
        total = Counts()
        for row in rows:
            if row["session"] == uid and row["kind"] == "usage":
                total += counts_of(row)
        if view != total:
            self.fail(f"session {uid[:4]} tells {view}, its rows sum to {total}")


def counts_of(row: dict[str, Any]) -> Counts:
    return Counts(**{name: row[name] for name in TOKEN_TYPES})


def expected_counts(operation: ops.Operation) -> Counts:
    """What an operation costs, worked out apart from the code under test."""
    match operation:
        case ops.Forward() | ops.ForwardBackward():
            return Counts(train=sum(datum.tokens.size for datum in operation.datums))
        case ops.Sample():
            prompt, n = prompt_tokens(operation), operation.num_samples
            sampled = n * operation.params.max_tokens
            return Counts(prefill=prompt, cached_prefill=prompt * (n - 1), sample=sampled)
        case ops.ComputeLogprobs():
            return Counts(prefill=operation.prompt.size)
    return Counts()


def _same_result(expected: Any, told: Any) -> bool:
    if isinstance(expected, ops.SaveResult) and isinstance(told, ops.SaveResult):
        told = msgspec.structs.replace(told, group=expected.group, version=expected.version)
    return msgspec.msgpack.encode(expected) == msgspec.msgpack.encode(told)


def _name(op: ClientOp) -> str:
    kind = type(op.operation).__name__
    return f"{kind} {op.uid[:4]}/{op.stream}/{op.number}{' (stream)' if op.streamed else ''}"
