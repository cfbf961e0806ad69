"""The ledger's logs: those all processes share, less what Alembic tells of each step."""

import logging

from gristmill_contracts.telemetry import setup_json_logging


def configure(level: str) -> None:
    """Send all logs of the process to standard error as JSON lines."""
    setup_json_logging("ledger", level=level)
    # Alembic tells each step at INFO; `ledger_migrated` says it in one line.
    logging.getLogger("alembic").setLevel(logging.WARNING)
