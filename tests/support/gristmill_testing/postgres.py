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
def running_postgres() -> Iterator[str]:
    """URL of a fresh server's maintenance database. Raises PostgresMissingError."""
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
        options = f"-k {folder} -c listen_addresses= -c fsync=off -c max_connections=60"
        control: list[str | Path] = [programs / "pg_ctl", "-D", folder / "data", "-w", "-l", folder / "log"]
        _run([*control, "-o", options, "start"], user)
        try:
            yield f"postgresql://test@/postgres?host={folder}"
        finally:
            _run([*control, "-m", "immediate", "stop"], user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
