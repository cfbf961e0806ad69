"""`python -m gristmill_worker`: serve the engine on a unix socket until SIGTERM."""

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import uvicorn

from gristmill_contracts.environment import describe_settings, read_settings
from gristmill_contracts.telemetry import setup_json_logging
from gristmill_worker.settings import WorkerSettings

SOCKET_PATH_BYTES_MAX: Final = 107
START_FAILED: Final = 3
KEEP_ALIVE_S: Final = 75
"""Longer than the meter's own idle limit: it closes its connections, never we while it sends."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 for bad settings, 3 if the socket cannot be opened."""
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_worker",
        description="Hold a base model and train and sample LoRA adapters over it.",
        epilog="environment:\n" + describe_settings(WorkerSettings),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings = read_settings(WorkerSettings, parser, arguments)
    if len(os.fsencode(settings.socket)) > SOCKET_PATH_BYTES_MAX:
        parser.error(f"the socket path {settings.socket} is longer than {SOCKET_PATH_BYTES_MAX}")
    setup_json_logging("worker", level=settings.log_level)
    logging.captureWarnings(capture=True)
    # Before torch opens the device: cuBLAS is deterministic only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Before torch loads OpenMP: threads that spin for each other took 20 times as long on two cores
    # that other processes use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return _serve(settings)


def _serve(settings: WorkerSettings) -> int:
    # Imported here, so that --help and bad settings are answered without loading torch.
    from gristmill_worker.app import make_app
    from gristmill_worker.engine import Engine

    engine = Engine(settings)
    engine.start()
    listener = _listen(settings.socket)
    config = uvicorn.Config(
        make_app(engine),
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.shutdown_s,
    )
    # uvicorn repeats the signal after its clean stop, which would end us as killed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    server = uvicorn.Server(config)
    server.run(sockets=[listener])
    engine.stop(settings.shutdown_s)
    settings.socket.unlink(missing_ok=True)
    return 0 if server.started else START_FAILED


def _listen(path: Path) -> socket.socket:
    """Bind the socket for this user alone; an old file of a killed worker is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener


if __name__ == "__main__":
    sys.exit(main())
