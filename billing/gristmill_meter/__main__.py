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
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.telemetry import setup_json_logging
from gristmill_meter.app import make_app
from gristmill_meter.disk import LocalDisk
from gristmill_meter.folder_lock import lock_folder
from gristmill_meter.ledger_client import LedgerClient
from gristmill_meter.meter import Meter
from gristmill_meter.settings import MeterSettings
from gristmill_meter.worker_client import WorkerClient

logger = logging.getLogger(__name__)

VOLUME_CHECK_S: Final = 0.5
EXIT_VOLUME_FAILED: Final = 3


class Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would raise them again at the end, and exit with 128 + n."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Parse `--help`, read the settings once, serve until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_meter",
        description="The operation log and usage source of training sessions.\n\nEnvironment:\n"
        + describe_settings(MeterSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = read_settings(MeterSettings, parser)
    setup_json_logging("meter", level=settings.log_level)
    sys.exit(asyncio.run(serve(settings)))


async def serve(settings: MeterSettings) -> int:
    """Serve until told to stop. 0 after an orderly end, 3 when the logs' volume failed."""
    worker = WorkerClient(str(settings.worker_socket))
    ledger = LedgerClient(settings.ledger_url)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    await asyncio.to_thread(lock_folder, settings.data_dir, settings.lock_wait_s)
    meter = Meter(
        settings=settings, disk=LocalDisk(settings.data_dir), worker=worker, ledger=ledger
    )
    worker.open()
    ledger.open()
    config = uvicorn.Config(
        make_app(meter),
        host=settings.host,
        port=settings.port,
        access_log=False,
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
