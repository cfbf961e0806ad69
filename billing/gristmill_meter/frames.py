"""The frames of a session's log. The session's state is a pure function of them, in order.

All times are UTC microseconds. A `Body` is an encoded operation or result: small ones lie in the frame,
large ones in a blob file that is durable before the frame that names it.
"""

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import Problem
from gristmill_contracts.ids import SessionUid, Stream, TenantName
from gristmill_contracts.operations import CheckpointRef
from gristmill_contracts.usage import Counts


class Body(msgspec.Struct, frozen=True, array_like=True):
    """Encoded bytes, inline or as the blob file `blob`. `crc` is the CRC32C of the bytes either way."""

    size: int
    crc: int
    inline: bytes | None = None
    blob: str = ""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened"):
    """Who the log belongs to from here on; written again when the attempt changes."""

    uid: SessionUid
    tenant: TenantName
    project: str
    model: str
    attempt: int
    at_us: int


class Intent(msgspec.Struct, frozen=True, kw_only=True, tag="intent"):
    """An accepted operation. `payload` holds it with the sampling adapter resolved."""

    stream: Stream
    number: int
    kind: str
    body_hash: bytes
    client_token: str | None
    payload: Body
    counts: Counts
    """Tokens known before it runs."""
    room_bytes: int
    """Room reserved for its result until it ends."""
    streaming: bool
    at_us: int
    key: str = ""
    """Id of the access key that submitted it; logs of older meters have none."""
    worst: Counts = Counts()
    """The most tokens that it may use: what is reserved of budgets before it is dispatched."""
    may_wait: bool = True
    """False: it fails at once where a budget does not afford it."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A train number that failed validation: closed, nothing run."""

    number: int
    client_token: str | None
    message: str
    breaks_accumulation: bool
    at_us: int


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """An operation that completed. Train operations and streams are billed by this frame.

    `index`: its place among the executed train operations, 0 for samples. `default_adapter`: the
    checkpoint that samples use from here on, if the operation made one the default.
    """

    stream: Stream
    number: int
    result: Body
    counts: Counts
    index: int
    checksum: int | None
    fingerprint: str
    wall_us: int
    default_adapter: CheckpointRef | None
    started_us: int
    at_us: int
    lease: str = ""
    """The budget lease that it was reserved under; "" = none."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """An operation that ran and failed. `index` 0: the worker never consumed one for it.

    `counts` is set for a token stream that was cut after tokens had left: billed, outcome aborted.
    """

    stream: Stream
    number: int
    error: Problem
    index: int
    wall_us: int
    started_us: int
    at_us: int
    counts: Counts | None = None
    lease: str = ""


class Skipped(msgspec.Struct, frozen=True, kw_only=True, tag="skipped"):
    """Operations that will never run."""

    operations: list[tuple[Stream, int]]
    reason: str
    at_us: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Tokens of a stream so far, durable before the flush that carries the last of them."""

    number: int
    prompt_tokens: int
    tokens: int
    started_us: int
    at_us: int
    lease: str = ""
    cached_tokens: int = 0
    """Of the prompt: counted as cached_prefill."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """The result of a keyless operation is about to be released: it is billed by this frame."""

    number: int
    at_us: int


class Expired(msgspec.Struct, frozen=True, kw_only=True, tag="expired"):
    """The results of keyless operations can never be released any more: kept as attempts, not billed."""

    numbers: list[int]
    at_us: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The worker holds a snapshot of the first `applied` executed train operations."""

    applied: int
    at_us: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    """What all frames before this one say; the first frame of a segment. Older ones may be gone.

    `state`: see `checkpoints`. `first_seq`: the oldest usage that is told from here on.
    """

    state: Body
    first_seq: int
    at_us: int


class SessionFailed(msgspec.Struct, frozen=True, kw_only=True, tag="session_failed"):
    """The session cannot go on. `skipped`: what was waiting; what runs still ends by its own frame."""

    error: Problem
    skipped: list[tuple[Stream, int]]
    at_us: int


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    """The session was stopped; nothing follows."""

    at_us: int


Frame = (
    Opened | Intent | Refused | Result | Failed | Skipped | Progress | Claim | Expired | Snapshot
    | SessionFailed | Closed | Checkpoint
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def checked_frame(frame: Frame) -> bytes:
    """Encode a frame. Raises InvalidRequestError if it would not fit into the log."""
    payload = encode_frame(frame)
    if len(payload) > limits.FRAME_BYTES_MAX:
        raise InvalidRequestError(
            f"the operation's record has {len(payload)} bytes; at most {limits.FRAME_BYTES_MAX} fit"
        )
    return payload


def decode_frame(payload: bytes | memoryview) -> Frame:
    """Raises msgspec.DecodeError or ValidationError for bytes that are no frame."""
    return _decoder.decode(payload)
