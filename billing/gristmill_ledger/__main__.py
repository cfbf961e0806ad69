"""`python -m gristmill_ledger`: serve the ledger until SIGTERM."""

import argparse
import gc
import signal
import socket
import sys
import time
from types import FrameType
from typing import Final

import uvicorn

from gristmill_contracts.environment import describe_settings, read_settings
from gristmill_ledger.app import make_app
from gristmill_ledger.chain import command
from gristmill_ledger.ledger import Ledger
from gristmill_ledger.logs import configure
from gristmill_ledger.settings import LedgerSettings

START_FAILED: Final = 3
SWITCH_INTERVAL_S: Final = 0.0005
COLLECT_AFTER: Final = (20_000, 10, 10)
"""New objects before a collection of the young, and collections before one of the older ones."""


class LedgerServer(uvicorn.Server):
    """Serves on for a while when it is told to stop, then ends held polls, so as not to wait for them."""

    def __init__(self, config: uvicorn.Config, ledger: Ledger) -> None:
        super().__init__(config)
        self.ledger = ledger
        self.stop_at = float("inf")
        """Time of the monotonic clock at which to stop."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal only makes us not ready; a second one, or a delay of 0, ends at once."""
        delay_s = self.ledger.settings.shutdown_delay_s
        if self.ledger.stopping or delay_s == 0:
            super().handle_exit(sig, frame)
            return
        self.ledger.stopping = True
        self.stop_at = time.monotonic() + delay_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the ledger; what that made is never looked through for garbage."""
        await super().startup(sockets)
        # What was imported stays. To look through all of it takes a tenth of a second, in which every
        # thread waits, and the time for it comes in the middle of somebody's commit.
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or time.monotonic() >= self.stop_at

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await self.ledger.wake()
        await super().shutdown(sockets)  # type: ignore[arg-type]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 for bad settings, 3 if the database or port failed."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["verify"]:
        return command.main(given[1:])
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_ledger",
        description="Keep usage, prices, checkpoints and tenants; answer what was used and what it "
        "cost. `verify` (see `verify --help`) verifies the ledger's rows instead.",
        epilog="environment:\n" + describe_settings(LedgerSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = read_settings(LedgerSettings, parser, arguments)
    configure(settings.log_level)
    # The writer and the loop hand the interpreter to each other at every statement; at the default
    # of 5 ms either may wait that long for it each time.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    ledger = Ledger(settings)
    config = uvicorn.Config(
        make_app(ledger),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=settings.shutdown_s,
    )
    # uvicorn repeats the signal after its clean stop, which would end us as killed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    server = LedgerServer(config, ledger)
    server.run()
    return 0 if server.started else START_FAILED


if __name__ == "__main__":
    sys.exit(main())
