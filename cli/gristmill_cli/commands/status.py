"""`gristmill status`: which processes run, and whether they are well."""

import asyncio
import json
from typing import Any, Final

import aiohttp
import typer

from gristmill_cli.cluster.parts import probe_parts
from gristmill_cli.errors import CommandError
from gristmill_cli.health import health_of
from gristmill_cli.local.instance import Instance, require_instance
from gristmill_cli.local.layout import Layout
from gristmill_cli.options import DataDir, Endpoint, LedgerUrl, OutputOption, find_layout
from gristmill_cli.output import Output, print_data, print_table, reports_errors
from gristmill_cli.times import age

Row = dict[str, Any]  # Any: JSON
PROBE_TIMEOUT_S: Final = 3


@reports_errors
def status(
    data_dir: DataDir = None,
    endpoint: Endpoint = "",
    ledger_url: LedgerUrl = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the processes of the running instance, or whether a cluster's gateway and ledger serve. Exit
    code 1 unless all of them are well."""
    if endpoint or ledger_url:
        _status_of_cluster({"gateway": endpoint, "ledger": ledger_url}, output)
        return
    layout = find_layout(data_dir)
    instance = require_instance(layout)
    rows = asyncio.run(_probe_all(read_processes(layout)))
    well = bool(rows) and all(row["health"] == "ready" for row in rows)
    if output is Output.TABLE:
        _print(instance, rows)
    else:
        print_data(
            {"url": instance.url, "pid": instance.pid, "well": well, "processes": rows}, output
        )
    if not well:
        raise typer.Exit(1)


def _status_of_cluster(urls: dict[str, str], output: Output) -> None:
    rows = asyncio.run(probe_parts({part: url for part, url in urls.items() if url}))
    well = all(row["health"] == "ready" for row in rows)
    if output is Output.TABLE:
        cells = [(row["name"], row["url"], row["health"]) for row in rows]
        print_table(("PART", "URL", "HEALTH"), cells)
    else:
        print_data({"well": well, "parts": rows}, output)
    if not well:
        raise typer.Exit(1)


def read_processes(layout: Layout) -> list[Row]:
    """What the supervisor last said of its children. Raises CommandError."""
    try:
        found = json.loads(layout.processes.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise CommandError(f"{layout.processes} cannot be read: {error}") from error
    return list(found)


async def _probe_all(rows: list[Row]) -> list[Row]:
    return list(await asyncio.gather(*(_probe(row) for row in rows)))


async def _probe(row: Row) -> Row:
    """The row with its `health`: ready, or what /readyz said."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    connector = aiohttp.UnixConnector(path=row["socket"]) if row["socket"] else None
    url = "http://worker" if row["socket"] else f"http://127.0.0.1:{row['port']}"
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as client,
            client.get(f"{url}/readyz") as response,
        ):
            return {**row, "health": health_of(response.status, await response.read())}
    except (aiohttp.ClientError, TimeoutError, OSError):
        return {**row, "health": "does not answer" if row["pid"] else "starting"}


def _print(instance: Instance, rows: list[Row]) -> None:
    typer.echo(
        f"gateway {instance.url}   ledger {instance.ledger_url}   supervisor process {instance.pid}"
    )
    print_table(
        ("PROCESS", "PID", "HEALTH", "RESTARTS", "AGE", "LOG"),
        [
            (
                row["name"],
                row["pid"],
                row["health"],
                row["restarts"],
                age(row["started_us"]),
                row["log"],
            )
            for row in rows
        ],
        numbers=("PID", "RESTARTS"),
    )
