"""`gristmill up`: everything on this machine, from the first key to the orderly end."""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from gristmill_cli.errors import CommandError
from gristmill_cli.keys import create_key, ensure_tenant, valid_key
from gristmill_cli.local.children import Child
from gristmill_cli.local.instance import Instance, announce
from gristmill_cli.local.layout import DATA_DIR_DEFAULT, GroupKey, Layout, find_data_dir
from gristmill_cli.local.ledger_client import LedgerClient
from gristmill_cli.local.ports import (
    GATEWAY_PORT_DEFAULT,
    LOOPBACK,
    Addresses,
    free_port,
    is_free,
    load_addresses,
)
from gristmill_cli.local.supervisor import Supervisor
from gristmill_cli.models import FACTS_FILE, add_model, name_of
from gristmill_cli.options import DEFAULT_TENANT
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.tenant import Tenant
from gristmill_contracts.units import now_us
from gristmill_sessions.local import LocalStore, open_local_store

logger = logging.getLogger(__name__)

Say = Callable[[str], None]

FAILED_RUNS_MAX: Final = 3
"""Runs of a part in a row that never got ready, after which `up` gives up at start."""
LOG_LINES_SHOWN: Final = 3
POLL_S: Final = 0.05
ANY_ADDRESS: Final = ("0.0.0.0", "::", "")  # noqa: S104


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    host: str = LOOPBACK
    port: int | None = None
    model: str = ""
    """Name of a known model, or where to get one; empty = whatever is registered."""
    dtype: str | None = None
    idle_group_stop_s: float = 300.0


def prepare(layout: Layout, options: UpOptions, say: Say) -> tuple[LocalStore, str]:
    """The store with a tenant, a key and the model asked for. Returns the model's name, or ''."""
    store = open_local_store(layout.store)
    ensure_tenant(store, DEFAULT_TENANT)
    if valid_key(store, DEFAULT_TENANT) is None:
        create_key(store, DEFAULT_TENANT, "made by the first `gristmill up`")
        say(f"made the first access key of tenant {DEFAULT_TENANT}")
    if not options.model:
        known = store.list(BaseModelResource)
        return store, known[0].metadata.name if len(known) == 1 else ""
    with contextlib.suppress(NotFoundError, ValueError):
        name = store.get(BaseModelResource, "", options.model).metadata.name
        if (Path(store.get(BaseModelResource, "", name).spec.weights.path) / FACTS_FILE).is_file():
            return store, name
    name = name_of(options.model)
    say(f"preparing model {name}")
    add_model(
        store, layout, name, options.model, dtype=options.dtype, say=lambda line: say(f"  {line}")
    )
    return store, name


def choose_port(addresses: Addresses, options: UpOptions) -> int:
    """The gateway's port: as asked, else the recorded or default one. Raises CommandError if taken."""
    if options.port == 0:
        return free_port(options.host)
    port = options.port or int(addresses.known.get("gateway", GATEWAY_PORT_DEFAULT))
    if not is_free(options.host, port):
        raise CommandError(
            f"port {port} on {options.host} is taken or not allowed; give another one with --port, or "
            "--port 0 for any"
        )
    return port


async def serve(
    layout: Layout, store: LocalStore, model: str, options: UpOptions, say: Say
) -> None:
    """Run until SIGINT or SIGTERM, then drain. A second signal ends everything at once."""
    addresses = load_addresses(layout)
    port = choose_port(addresses, options)
    addresses.forget_taken()
    addresses.record("gateway", port)
    shown_host = LOOPBACK if options.host in ANY_ADDRESS else options.host
    ledger_url = f"http://{LOOPBACK}:{addresses.port('ledger')}"
    instance = Instance(
        pid=os.getpid(),
        url=f"http://{shown_host}:{port}",
        ledger_url=ledger_url,
        started_us=now_us(),
    )
    announce(layout, instance)
    async with aiohttp.ClientSession() as http:
        supervisor = Supervisor(
            layout=layout,
            store=store,
            addresses=addresses,
            ledger=LedgerClient(http, ledger_url),
            ledger_url=ledger_url,
            gateway_host=options.host,
            gateway_port=port,
            idle_group_stop_s=options.idle_group_stop_s,
            warm={GroupKey(DEFAULT_TENANT, model)} if model else set(),
        )
        _on_signals(supervisor, say)
        running = asyncio.create_task(supervisor.run(), name="supervisor")
        starting = asyncio.create_task(_wait_until_ready(supervisor, store, model, say))
        await asyncio.wait({running, starting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if starting.done() and not supervisor.stopping:
                starting.result()
                announce(layout, instance.as_ready())
                say(banner(instance.url, layout, model))
        except CommandError:
            supervisor.stop()
            raise
        finally:
            if not starting.done():
                starting.cancel()
            await running
        say("stopped")


async def _wait_until_ready(
    supervisor: Supervisor, store: LocalStore, model: str, say: Say
) -> None:
    """Raises CommandError with the last lines of its log if a part does not come up."""
    names = ["ledger", "gateway"]
    names += [f"worker.{GroupKey(DEFAULT_TENANT, model)}"] if model else []
    for name in names:
        say(f"starting {name}")
        while not supervisor.is_ready(name):
            child = supervisor.children.get(name)
            if child is not None and child.short_runs >= FAILED_RUNS_MAX:
                raise CommandError(
                    f"{name} does not start (exit code {child.exit_code}): {last_words(child)}; its log is "
                    f"{child.program.log}"
                )
            await asyncio.sleep(POLL_S)
    while not store.get(Tenant, "", DEFAULT_TENANT).status.account_id:
        await asyncio.sleep(POLL_S)


def last_words(child: Child) -> str:
    """The end of a child's log, in one line."""
    try:
        lines = child.program.log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log"
    said = dict.fromkeys(_plain(line) for line in lines[-LOG_LINES_SHOWN:])
    return " | ".join(said) or "its log is empty"


def _plain(line: str) -> str:
    try:
        parsed = json.loads(line)
    except ValueError:
        return line.strip()
    return str(parsed.get("event", line)) if isinstance(parsed, dict) else line


def _on_signals(supervisor: Supervisor, say: Say) -> None:
    loop = asyncio.get_running_loop()

    def received() -> None:
        if supervisor.stopping:
            say("ending at once")
            supervisor.kill()
            return
        say("stopping: what runs is finished, usage is posted (again to end at once)")
        supervisor.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, received)


def banner(url: str, layout: Layout, model: str) -> str:
    """What is there, and what to do next."""
    is_default = layout.root == find_data_dir(Path(DATA_DIR_DEFAULT))
    data_dir = "" if is_default else f" --data-dir {shlex.quote(str(layout.root))}"
    lines = [
        "",
        f"Gristmill is ready at {url}",
        f"  data folder   {layout.root}",
        f"  base model    {model or 'none yet: gristmill models add NAME [SOURCE]'}",
        "",
        "In another terminal:",
        f'  eval "$(gristmill env{data_dir})"     # then any program on the official SDK works as it is',
        f"  gristmill usage{data_dir} --group-by session",
        f"  gristmill get sessions{data_dir}",
        "",
        "Ctrl-C stops everything in order; sessions go on at the next `gristmill up`.",
    ]
    return "\n".join(lines)
