"""Start the meter: `python -m gristmill_meter`. Settings come from the environment; see `--help`."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn

from gristmill_contracts.environment import describe_settings, read_settings
from gristmill_contracts.errors import GristmillError, InvalidRequestError
from gristmill_contracts.telemetry import setup_json_logging
from gristmill_meter.app import make_app
from gristmill_meter.disk import LocalDisk
from gristmill_meter.drain import Drain
from gristmill_meter.folder_lock import lock_folder
from gristmill_meter.ledger_client import LedgerClient, read_secret
from gristmill_meter.listing import list_logs, table
from gristmill_meter.meter import Meter
from gristmill_meter.settings import MeterSettings
from gristmill_meter.worker_client import WorkerClient

logger = logging.getLogger(__name__)

VOLUME_CHECK_S: Final = 0.5
EXIT_VOLUME_FAILED: Final = 3
DRAIN_TIMEOUT_S: Final = 600.0
DRAIN_EXITS: Final = """exit status of drain:
  0  everything is shipped and the ledger was told, or there was nothing
  1  another meter holds the data folder, or a bug
  2  wrong settings
  3  the volume failed
  4  a log is damaged, or older than the ledger knows: usage is lost
  5  the ledger did not take everything in time: run it again
  6  a newer attempt owns a session; what was here was handed in"""


class Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would raise them again at the end, and exit with 128 + n."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(arguments: list[str] | None = None) -> None:
    """Read the settings once; serve until SIGTERM, or drain."""
    parser = _parser()
    given = parser.parse_args(arguments)
    settings = read_settings(MeterSettings, parser, arguments)
    setup_json_logging("meter", level=settings.log_level)
    if given.list:
        if given.command != "drain":
            parser.error("--list is of drain: python -m gristmill_meter drain --list")
        print(table(list_logs(LocalDisk(settings.data_dir))))
        return
    secret = ""
    try:
        if settings.producer_secret_file is not None:
            secret = read_secret(settings.producer_secret_file)
    except InvalidRequestError as error:
        parser.error(error.message)
    if given.command == "drain":
        sys.exit(asyncio.run(drain(settings, secret, given.timeout_s)))
    sys.exit(asyncio.run(serve(settings, secret)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_meter",
        description="The operation log and usage source of training sessions.\n\nEnvironment:\n"
        + describe_settings(MeterSettings),
        epilog=DRAIN_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("serve", "drain"),
        default="serve",
        help="serve (default), or drain: close the logs of all assigned sessions, or of all sessions "
        "in the data folder if none is assigned, and ship them; needs no worker",
    )
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=DRAIN_TIMEOUT_S,
        help="how long drain waits for the ledger (default %(default)s)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="with drain: only tell which logs lie in the data folder; nothing is changed or sent",
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time above 0")
    return seconds


async def drain(settings: MeterSettings, secret: str, timeout_s: float) -> int:
    """Ship what the volume holds. The status is one of DRAIN_EXITS."""
    if not settings.data_dir.is_dir() and not settings.assignments_dir.is_dir():
        logger.info("drain_found_nothing", extra={"folder": str(settings.data_dir)})
        return 0
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    await asyncio.to_thread(lock_folder, settings.data_dir, settings.lock_wait_s)
    ledger = LedgerClient(settings.ledger_url, secret)
    ledger.open()
    try:
        disk = LocalDisk(settings.data_dir)
        return await Drain(settings=settings, disk=disk, ledger=ledger, timeout_s=timeout_s).run()
    finally:
        await ledger.close()


async def serve(settings: MeterSettings, secret: str) -> int:
    """Serve until told to stop. 0 after an orderly end, 3 when the logs' volume failed."""
    worker = WorkerClient(str(settings.worker_socket))
    ledger = LedgerClient(settings.ledger_url, secret)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    await asyncio.to_thread(lock_folder, settings.data_dir, settings.lock_wait_s)
    meter = Meter(
        settings=settings,
        disk=LocalDisk(settings.data_dir),
        worker=worker,
        ledger=ledger,
        registers_first=settings.producer_secret_file is not None,
    )
    worker.open()
    ledger.open()
    config = uvicorn.Config(
        make_app(meter),
        host=settings.host,
        port=settings.port,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(settings.drain_s),
    )
    server = Server(config)

    def end() -> None:
        meter.begin_drain()  # At once: held polls would otherwise delay the shutdown.
        server.should_exit = True

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, end)
    watch = asyncio.create_task(_stop_when_volume_fails(server, meter))
    try:
        await server.serve()
    finally:
        watch.cancel()
        await worker.close()
        await ledger.close()
    logger.info("meter_stopped")
    return EXIT_VOLUME_FAILED if meter.volume_failed else 0


async def _stop_when_volume_fails(server: Server, meter: Meter) -> None:
    """A meter that cannot write must not go on: whoever restarts it finds the log as it is."""
    while not meter.volume_failed:
        await asyncio.sleep(VOLUME_CHECK_S)
    server.should_exit = True


if __name__ == "__main__":
    try:
        main()
    except GristmillError as error:
        sys.exit(f"gristmill_meter: {error.message}")
