"""A private PostgreSQL for tests: a real server on a unix socket in a temporary folder."""

import glob
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

SERVER_USERS = ("postgres", "nobody")
"""Whom the server runs as when the tests run as root, which PostgreSQL refuses to do."""


class PostgresMissingError(Exception):
    """There is no PostgreSQL here that could be started; the text says why."""


@contextmanager
def running_postgres(*, durable: bool = False) -> Iterator[str]:
    """URL of a fresh server's maintenance database. Raises PostgresMissingError.

    Without `durable` nothing is synced: fit for tests of what SQL does, not for benchmarks.
    """
    tools = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=_version)
    if not tools:
        raise PostgresMissingError("no /usr/lib/postgresql/*/bin/initdb: install postgresql")
    programs = Path(tools[-1]).parent
    user = _server_user()
    # A unix socket's path holds 107 characters: pytest's own folders may be too deep.
    folder = Path(tempfile.mkdtemp(prefix="gm-pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        _run([programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "test", "-E", "UTF8",
              "--locale=C.UTF-8", "--no-sync"], user)  # fmt: skip
        settings = [f"unix_socket_directories = '{folder}'", "listen_addresses = ''",
                    "max_connections = 60", *([] if durable else ["fsync = off"])]  # fmt: skip
        with (folder / "data/postgresql.conf").open("a") as file:
            file.write("\n".join(settings))
        url = f"postgresql://test@/postgres?host={folder}"
        _control(url, "start")
        try:
            yield url
        finally:
            _control(url, "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stop_postgres(server_url: str, *, start: bool = False) -> None:
    """Stop the server of this URL as a crash does, or start it again."""
    _control(server_url, "start" if start else "stop")


def _control(server_url: str, action: str) -> None:
    folder = Path(server_url.partition("host=")[2])
    program = sorted(glob.glob("/usr/lib/postgresql/*/bin/pg_ctl"), key=_version)[-1]
    mode = ["-m", "immediate"] if action == "stop" else []
    _run(
        [program, "-D", folder / "data", "-w", "-l", folder / "log", *mode, action], _server_user()
    )


def create_database(server_url: str, name: str, template: str = "template0") -> str:
    """Make a database as empty as `template`; returns its URL."""
    # FILE_COPY writes a checkpoint each time, the WAL only the small template.
    command = f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY WAL_LOG'
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(command.encode())
    return server_url.replace("/postgres?", f"/{name}?")


def _version(path: str) -> float:
    return float(path.split("/")[4])


def _server_user() -> str | None:
    if os.geteuid() != 0:
        return None
    for name in SERVER_USERS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise PostgresMissingError(f"root may not run PostgreSQL, and there is none of {SERVER_USERS}")


def _run(command: list[str | Path], user: str | None) -> None:
    # pg_ctl's server inherits the pipes: without a file the read would wait for its end.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            command, user=user, group=_group(user), extra_groups=[] if user else None,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False, cwd="/",
        )  # fmt: skip
        if done.returncode:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise PostgresMissingError(f"{command[0]} failed: {text[-500:]}")


def _group(user: str | None) -> int | None:
    return None if user is None else pwd.getpwnam(user).pw_gid
