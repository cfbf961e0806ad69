"""`python -m gristmill_worker`: serve the engine on a unix socket until SIGTERM."""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn

from gristmill_contracts.environment import describe_settings, read_settings
from gristmill_contracts.telemetry import setup_json_logging
from gristmill_worker.kept_kernels import divide_folder
from gristmill_worker.libraries import tell_libraries
from gristmill_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from gristmill_worker.team import Team

SOCKET_PATH_BYTES_MAX: Final = 107
START_FAILED: Final = 3
LEFT_EARLY: Final = 128 + signal.SIGTERM
"""Stopped before there was anything to stop."""
KEEP_ALIVE_S: Final = 75
"""Longer than the meter's own idle limit: it closes its connections, never we while it sends."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 for bad settings, 3 if the socket cannot be opened."""
    # As process 1 of a container we would ignore SIGTERM until torch and the server are there.
    signal.signal(signal.SIGTERM, _leave)
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
    tell_libraries()
    divide_folder()
    return _serve(settings)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(LEFT_EARLY)


def _serve(settings: WorkerSettings) -> int:
    # Imported here, so that --help and bad settings are answered without loading torch.
    from gristmill_worker.app import make_app
    from gristmill_worker.engine import Engine
    from gristmill_worker.team import team_from_environment

    team = team_from_environment()
    if not team.leads:
        return _follow(settings, team)
    mode = int(settings.socket_mode, 8)
    if mode & 0o060:
        # The meter, another user of our group, reads checkpoints and writes what it fetched beside them.
        os.umask(0o007)
    listener = _listen(settings.socket, mode)
    _give_up_network(settings, alone=team.alone)
    engine = Engine(settings, team)
    engine.start()
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


def _follow(settings: WorkerSettings, team: "Team") -> int:
    """Ranks other than 0 serve nobody."""
    from gristmill_worker.engine import TEAM_LOST, backend, load_base
    from gristmill_worker.follower import Follower, end_at_sigterm, tell_ready
    from gristmill_worker.team import TeamLostError

    idle = threading.Event()
    idle.set()
    end_at_sigterm(idle, settings.shutdown_s)
    try:
        team.join(
            backend(settings), start_s=settings.team_start_s, timeout_s=settings.team_timeout_s
        )
        base = load_base(settings, team)
        team.gather("loaded")
        tell_ready(settings.ready_file)
        follower = Follower(base=base, team=team, token_budget=settings.token_budget, idle=idle)
        follower.follow()
    except TeamLostError as error:
        logging.getLogger(__name__).critical("team_lost", extra={"error": str(error)})
        return TEAM_LOST
    team.leave()
    return 0


def _give_up_network(settings: WorkerSettings, *, alone: bool) -> None:
    """Raises SandboxError where the settings insist and the system cannot."""
    from gristmill_worker.sandbox import SandboxError, forbid_network

    wanted = settings.network
    if wanted == "full" or (wanted == "auto" and not alone):
        return
    try:
        forbid_network()
    except SandboxError as error:
        if wanted == "none":
            raise
        logging.getLogger(__name__).warning("network_kept", extra={"error": str(error)})


def _listen(path: Path, mode: int) -> socket.socket:
    """Bind the socket with these permissions; an old file of a killed worker is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(mode)
    return listener


if __name__ == "__main__":
    sys.exit(main())
