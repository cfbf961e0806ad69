"""Rating: which prices each usage row has, what that makes, and sums of it by hour and month."""

from decimal import Decimal
from typing import Any, Final

from sqlalchemy import Column, Dialect, LargeBinary, Numeric, Table, Text
from sqlalchemy.types import TypeDecorator, TypeEngine

from gristmill_ledger.schema.base import INT64, metadata

AMOUNT_DIGITS: Final = 60


class Amount(TypeDecorator[int]):
    """A whole number of any size: NUMERIC on PostgreSQL, digits in a TEXT on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:  # Any: of either database
        if dialect.name == "postgresql":
            return dialect.type_descriptor(Numeric(AMOUNT_DIGITS, 0))
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: int | None, dialect: Dialect) -> Decimal | str | None:
        if value is None:
            return None
        return Decimal(value) if dialect.name == "postgresql" else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:  # Any: as above
        return None if value is None else int(value)


rate = Table(
    "rate",
    metadata,
    Column("id", INT64, primary_key=True, autoincrement=False),
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("book", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("created_us", INT64, nullable=False),
)
"""A set of prices that were in force together, made on first use. `digest`: SHA-256 of what it says.

`currency`: "" where the ledger had no such book.
"""

rate_price = Table(
    "rate_price",
    metadata,
    Column("rate", INT64, primary_key=True, autoincrement=False),
    Column("token_type", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("effective_from_us", INT64, nullable=False),
    Column("micros_per_mtok", INT64, nullable=False),
)
"""The price rows of a rate. A token type without one had no price: never 0."""

rating_run = Table(
    "rating_run",
    metadata,
    Column("id", INT64, primary_key=True, autoincrement=False),
    Column("tenant", Text, nullable=False),
    Column("book", Text, nullable=False),
    Column("since_us", INT64, nullable=False),
    Column("until_us", INT64, nullable=False),
    Column("reason", Text, nullable=False),
    Column("written_by", Text, nullable=False),
    Column("started_us", INT64, nullable=False),
)
"""A decision to rate again, and what it was for: "" = of any tenant, of any book."""

rated_usage = Table(
    "rated_usage",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("run", INT64, primary_key=True, autoincrement=False),
    Column("rate", INT64, nullable=False),
    Column("amount_pico", Amount),
    Column("rated_us", INT64, nullable=False),
)
"""What a usage row costs: its first rating has run 0, later ones hold the difference alone.

The rate of the highest run is the one in force. `amount_pico` is NULL where the row's usage is unknown or
one of its tokens had no price; the first run that finds one holds the whole amount.
"""

rating_cursor = Table(
    "rating_cursor",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("seq", INT64, nullable=False),
)
"""Up to which row a tenant's usage is rated and in the sums below. State."""


def _rollup(name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("tenant", Text, primary_key=True),
        Column("bucket_us", INT64, primary_key=True, autoincrement=False),
        Column("session", Text, primary_key=True),
        Column("project", Text, primary_key=True),
        Column("key", Text, primary_key=True),
        Column("model", Text, primary_key=True),
        Column("operation", Text, primary_key=True),
        Column("kind", Text, primary_key=True),
        Column("odd", INT64, primary_key=True, autoincrement=False),
        Column("rate", INT64, primary_key=True, autoincrement=False),
        Column("part", INT64, primary_key=True, autoincrement=False),
        Column("events", INT64, nullable=False),
        Column("unknown", INT64, nullable=False),
        Column("prefill", INT64, nullable=False),
        Column("cached_prefill", INT64, nullable=False),
        Column("sample", INT64, nullable=False),
        Column("train", INT64, nullable=False),
        Column("prefill_with", INT64, nullable=False),
        Column("cached_prefill_with", INT64, nullable=False),
        Column("sample_with", INT64, nullable=False),
        Column("train_with", INT64, nullable=False),
        Column("through_seq", INT64, nullable=False),
    )


usage_rollup_hourly = _rollup("usage_rollup_hourly")
"""Sums of usage rows by the UTC hour in which their operation began. State: it follows from the rows.

`odd`: 1 where the rows are quarantined. `rate`: 0 = not billed. `part`: 0, or the `seq` of a row whose
quantities are so large that it is summed alone, for sums must fit into 64 bits. `unknown`: rows of
unknown usage, in no sum. `*_with`: rows with tokens of that type. `through_seq`: the last row in it.
"""

usage_rollup_monthly = _rollup("usage_rollup_monthly")
"""The same by UTC month, for long times: `session`, `project` and `key` are "" in all rows."""

usage_total_daily = _rollup("usage_total_daily")
"""The same by UTC day, for questions over many tenants: `operation` is "" too in all rows."""

usage_total_monthly = _rollup("usage_total_monthly")
"""The same by UTC month."""
