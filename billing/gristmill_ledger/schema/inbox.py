"""Operations and results of sessions that no meter serves. State: facts are the usage they become."""

from sqlalchemy import Column, LargeBinary, Table, Text

from gristmill_ledger.schema.base import INT64, metadata

inbox = Table(
    "inbox",
    metadata,
    Column("session", Text, primary_key=True),
    Column("tenant", Text, nullable=False),
    Column("last_position", INT64, nullable=False),
    Column("log_number", INT64, nullable=False),
    Column("waiting", INT64, nullable=False),
    Column("waiting_bytes", INT64, nullable=False),
    Column("served_by", INT64),
    Column("served_us", INT64),
    Column("claimed_by", INT64),
    Column("closed_us", INT64),
)
"""`served_by`: the attempt that found it empty, at `served_us`, and serves; `claimed_by`:
the last one that asked; `closed_us`: since then nothing is taken."""

inbox_entry = Table(
    "inbox_entry",
    metadata,
    Column("session", Text, primary_key=True),
    Column("position", INT64, primary_key=True, autoincrement=False),
    Column("stream", Text, nullable=False),
    Column("number", INT64, nullable=False),
    Column("kind", Text, nullable=False),
    Column("client_token", Text),
    Column("body_hash", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("body", LargeBinary),
    Column("blob", Text),
    Column("size", INT64, nullable=False),
    Column("accepted_us", INT64, nullable=False),
    Column("ended_us", INT64),
)
"""`state`: waiting, taken (a meter's log has it) or skipped. The body is here, else in the store under
`blob`; it goes when a meter has taken it. What remains says which submit was which operation."""

archive = Table(
    "archive",
    metadata,
    Column("session", Text, primary_key=True),
    Column("stream", Text, primary_key=True),
    Column("number", INT64, primary_key=True, autoincrement=False),
    Column("tenant", Text, nullable=False),
    Column("view", LargeBinary, nullable=False),
    Column("body", LargeBinary),
    Column("blob", Text),
    Column("size", INT64, nullable=False),
    Column("expires_us", INT64, nullable=False),
)
"""An operation that ended: `view` is its OperationView without the result (msgpack), the result is `body`,
or in the store under `blob`."""
