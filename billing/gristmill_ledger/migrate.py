"""Bring the database to the schema of this version: `python -m gristmill_ledger.migrate`.

Runs at every start too. One transaction holds the lock (SQLite: BEGIN IMMEDIATE; PostgreSQL: an
advisory lock), the steps and the seed, so that two starting processes migrate once.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, text

from gristmill_contracts.environment import describe_settings
from gristmill_ledger.grants import grant
from gristmill_ledger.logs import configure
from gristmill_ledger.prices import seed_example_prices
from gristmill_ledger.settings import LedgerSettings

log = logging.getLogger(__name__)
ADVISORY_LOCK: Final = 0x6772_6973_746D  # "gristm"
TABLE_LOCK_S: Final = 60
"""How long a step may wait for replicas of the version before, which serve on meanwhile."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when the database has the newest schema, and the role its rights."""
    from gristmill_ledger.database import open_engine

    parser = argparse.ArgumentParser(
        prog="python -m gristmill_ledger.migrate",
        description="Bring the ledger's database to the schema of this version.",
        epilog="environment:\n" + describe_settings(LedgerSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--grant-to",
        metavar="ROLE",
        help="PostgreSQL role that serves: it gets no right to change a fact",
    )
    options = parser.parse_args(arguments)
    settings = LedgerSettings()
    configure(settings.log_level)
    engine = open_engine(settings.url, busy_timeout_s=settings.busy_timeout_s, connections=1)
    migrate(engine)
    if options.grant_to:
        grant(engine, options.grant_to)
        log.info("ledger_role_granted", extra={"role": options.grant_to})
    engine.dispose()
    return 0


def migrate(engine: Engine, revision: str = "head") -> None:
    """Upgrade to `revision`, then seed the example prices into a ledger that has no price book.

    Raises CommandError if the database was made by a newer version of this program.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            _take_turn(connection)
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, revision)
        except CommandError as error:
            raise CommandError(
                f"{error}; the database holds a revision that this version does not know: "
                "start the version that made it, or a newer one"
            ) from error
        if revision == "head":
            seed_example_prices(connection)
    log.info("ledger_migrated", extra={"revision": revision, "dialect": engine.dialect.name})


def _take_turn(connection: Connection) -> None:
    """Wait for whoever migrates now, however long that takes; but not so for the tables' locks."""
    connection.execute(text("SET LOCAL lock_timeout = 0"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
    connection.execute(text(f"SET LOCAL lock_timeout = '{TABLE_LOCK_S}s'"))


if __name__ == "__main__":
    sys.exit(main())
