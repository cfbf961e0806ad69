"""Start the gateway: `python -m gristmill_gateway`. Settings come from the environment; see `--help`."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvicorn

from gristmill_contracts import limits
from gristmill_contracts.environment import describe_settings, read_settings
from gristmill_contracts.errors import GristmillError
from gristmill_contracts.secrets import operation_key
from gristmill_contracts.telemetry import setup_json_logging
from gristmill_gateway.app import Gateway, make_app, make_gateway, open_http
from gristmill_gateway.keys import load_or_create_key
from gristmill_gateway.kubernetes_cluster import open_cluster
from gristmill_gateway.settings import GatewaySettings
from gristmill_gateway.whole_answers import WholeAnswers
from gristmill_sessions.local import open_local_store

logger = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn would raise them again at the end, and exit with 128 + n."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Parse `--help`, read the settings once, serve until SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_gateway",
        description="The public door: SageMaker control and runtime plane, and S3.\n\nEnvironment:\n"
        + describe_settings(GatewaySettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = read_settings(GatewaySettings, parser)
    setup_json_logging("gateway", level=settings.log_level)
    asyncio.run(serve(settings))


async def serve(settings: GatewaySettings) -> None:
    """Serve until told to stop. Then no new calls are asked for, held answers are let go, and it ends."""
    threads = ThreadPoolExecutor(limits.GATEWAY_THREADS_MAX, thread_name_prefix="gateway")
    asyncio.get_running_loop().set_default_executor(threads)
    gateway = open_gateway(settings)
    config = uvicorn.Config(
        make_app(gateway),
        http=WholeAnswers,
        host=settings.host,
        port=settings.port,
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=settings.shutdown_s,
        server_header=False,
    )
    server = Server(config)

    def end() -> None:
        gateway.begin_drain()
        server.should_exit = True

    def leave() -> None:
        gateway.begin_leave()
        logger.info("gateway_leaves", extra={"after_s": settings.leave_s})
        loop.call_later(settings.leave_s, end)

    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, leave)
    await server.serve()
    logger.info("gateway_stopped")


def open_gateway(settings: GatewaySettings) -> Gateway:
    """Over the store that the settings name."""
    if settings.store == "local":
        key = load_or_create_key(settings.operation_key_file)
        return make_gateway(settings, open_local_store(settings.store_path), key, open_http())
    cluster = open_cluster(settings)
    key = operation_key(cluster.key)
    return make_gateway(settings, cluster.store, key, open_http(), cluster=cluster)


if __name__ == "__main__":
    try:
        main()
    except GristmillError as error:
        sys.exit(f"gristmill_gateway: {error.message}")
