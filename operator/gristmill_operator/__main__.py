"""`python -m gristmill_operator`: run the operator until SIGTERM."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from typing import Final

from gristmill_contracts.environment import describe_settings, read_settings
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.telemetry import setup_json_logging
from gristmill_operator.main import operate
from gristmill_operator.settings import OperatorSettings

COLLECT_AFTER: Final = (20_000, 20, 50)
"""New objects before a collection of the young, and young collections before one of the older ones."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 1 if leadership or the API was lost, 2 for bad settings,

    3 if permissions or custom resource definitions are missing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_operator",
        description="Keep training sessions, tenants, base models and rate cards as their resources say.",
        epilog="environment:\n" + describe_settings(OperatorSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = read_settings(OperatorSettings, parser, arguments)
    setup_json_logging("operator", level=settings.log_level)
    # kopf says at each start that it does not handle signals, which is what we want.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        return asyncio.run(_operate(settings))
    except GristmillError as error:
        parser.error(error.message)


async def _operate(settings: OperatorSettings) -> int:
    from gristmill_operator.compose import compose

    # What was imported stays, and what the cache holds is no garbage: to look through all of it again and
    # again takes a tenth of a second each time, in which nobody is answered.
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await operate(settings, compose, stop)


if __name__ == "__main__":
    sys.exit(main())
