"""A session's state with the log that made it, driven by decisions alone: no disk, no worker."""

from gristmill_contracts import operations as ops
from gristmill_contracts.http import Problem, Refuse, Submit
from gristmill_contracts.ids import SessionUid, Stream, TenantName
from gristmill_meter import frames
from gristmill_meter.decisions import Accept, Duplicate, Room, next_train, on_refuse, on_submit
from gristmill_meter.frames import Body, Frame
from gristmill_meter.records import Key, SessionState
from gristmill_meter.state import apply
from gristmill_testing.meter_world import forward_backward, make_submit

ROOM = Room(free_bytes=2**40, free_bytes_min=0, context_length=4096)
UID = SessionUid("s")


class Book:
    """A state and the log that made it."""

    def __init__(self) -> None:
        self.state = SessionState(uid=UID)
        self.frames: list[Frame] = []
        self.started: set[Key] = set()
        self.now_us = 1_000
        self.take(
            frames.Opened(
                uid=UID, tenant=TenantName("t"), project="", model="m", attempt=1, at_us=1
            )
        )

    def take(self, frame: Frame) -> None:
        self.frames.append(frame)
        apply(self.state, frame)
        self.now_us += 10

    def submit(self, submit: Submit, room: Room = ROOM) -> Accept | Duplicate:
        decision = on_submit(self.state, submit, self.started, room)
        if isinstance(decision, Accept):
            self.take(
                frames.Intent(
                    stream=submit.stream,
                    number=decision.number,
                    kind=ops.kind_of(submit.operation),
                    body_hash=submit.body_hash,
                    client_token=submit.client_token,
                    payload=Body(size=100, crc=0, inline=b""),
                    counts=ops.count_before(submit.operation),
                    room_bytes=decision.room_bytes,
                    streaming=False,
                    at_us=self.now_us,
                )
            )
        return decision

    def train(self, number: int, operation: ops.Operation | None = None) -> Accept | Duplicate:
        return self.submit(make_submit(number, operation or forward_backward(3, number)))

    def refuse(self, number: int, *, breaks: bool = True) -> Accept | Duplicate:
        refusal = Refuse(
            number=number, client_token=None, message="bad", breaks_accumulation=breaks
        )
        decision = on_refuse(self.state, refusal)
        if isinstance(decision, Accept):
            self.take(
                frames.Refused(
                    number=number,
                    client_token=None,
                    message="bad",
                    breaks_accumulation=breaks,
                    at_us=self.now_us,
                )
            )
        return decision

    def end(self, number: int, *, failed: bool = False, stream: Stream = "train") -> None:
        """The operation ran, well or not."""
        index = self.state.executed_count + 1 if stream == "train" else 0
        if failed:
            self.take(
                frames.Failed(
                    stream=stream,
                    number=number,
                    error=Problem(code="operation_failed", message="no"),
                    index=index,
                    wall_us=5,
                    started_us=7,
                    at_us=self.now_us,
                )
            )
            return
        self.take(
            frames.Result(
                stream=stream,
                number=number,
                result=Body(size=1, crc=0, inline=b""),
                counts=self.state.records[stream, number].counts,
                index=index,
                checksum=None,
                fingerprint="f",
                wall_us=5,
                default_adapter=None,
                started_us=7,
                at_us=self.now_us,
            )
        )

    def runs(self) -> list[int]:
        """Let everything run that may; the numbers in the order in which they ran."""
        ran = []
        while (decision := next_train(self.state, self.state.frames)) is not None:
            if decision.verb == "skip":
                key = decision.record.key
                self.take(frames.Skipped(operations=[key], reason="", at_us=self.now_us))
                continue
            ran.append(decision.record.number)
            self.end(decision.record.number)
        return ran
