"""Typed ids, and the ids that are pure functions of other ids.

An operation is named once, by its client or its meter, and every later id is computed from that
name, so that whoever takes over a retry computes the same ids.
"""

import hashlib
import uuid
from typing import Final, Literal, NamedTuple, NewType

SessionUid = NewType("SessionUid", str)
"""The durable identity of a session: a lower-case UUID, minted once, kept over restores."""
TenantName = NewType("TenantName", str)
CheckpointId = NewType("CheckpointId", str)
EventId = NewType("EventId", str)

Stream = Literal["train", "log"]
"""`train` carries the client's sequence numbers; `log` the meter's own (keyless operations)."""

UsageKind = Literal["usage", "attempt", "adjustment", "void"]
"""`usage` is billed; `attempt` ran, but its result can never be released: kept, not billed.

`adjustment` and `void` correct another event by name. The ledger makes them, never a meter.
"""

EVENT_NAMESPACE: Final = uuid.UUID("6b1f3c60-5f0e-5a51-9a51-0d6f1e0d9c01")
_EVENT_PREFIX: Final = EVENT_NAMESPACE.bytes
_VARIANTS: Final = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))
"""The two highest bits of a UUID's ninth byte are 1 and 0."""
CHECKPOINT_NAMESPACE: Final = uuid.UUID("6b1f3c60-5f0e-5a51-9a51-0d6f1e0d9c02")


class OpId(NamedTuple):
    """The one name of an operation in every hop: (session uid, stream, number)."""

    session: SessionUid
    stream: Stream
    number: int

    def __str__(self) -> str:
        return f"{self.session}/{self.stream}/{self.number}"


def parse_op_id(text: str) -> OpId:
    """Read `str(OpId)` back. Raises ValueError with the text if it is not one."""
    parts = text.split("/")
    stream = _STREAMS.get(parts[1]) if len(parts) == 3 else None
    if stream is None or not parts[2].isdecimal():
        raise ValueError(f"{text!r} is not an operation id of the form <session>/<stream>/<number>")
    return OpId(SessionUid(parts[0]), stream, int(parts[2]))


def event_id(op: OpId, kind: UsageKind, n: int = 0) -> EventId:
    """UUIDv5 of (operation, kind, n): the dedupe key of a usage event in the ledger."""
    name = f"{op.session}/{op.stream}/{op.number}/{kind}/{n}"
    # As `uuid.uuid5` does it, in a quarter of its time: the ledger computes it for every event.
    text = hashlib.sha1(_EVENT_PREFIX + name.encode(), usedforsecurity=False).hexdigest()
    variant = _VARIANTS[text[16]]
    return EventId(f"{text[:8]}-{text[8:12]}-5{text[13:16]}-{variant}{text[17:20]}-{text[20:32]}")


def checkpoint_id(op: OpId) -> CheckpointId:
    """UUIDv5 of the saving operation, so that a save that runs again writes the same checkpoint."""
    return CheckpointId(str(uuid.uuid5(CHECKPOINT_NAMESPACE, str(op))))


def new_session_uid() -> SessionUid:
    """A fresh random session uid."""
    return SessionUid(str(uuid.uuid4()))


_STREAMS: Final[dict[str, Stream]] = {"train": "train", "log": "log"}
