"""Options that many commands share."""

from pathlib import Path
from typing import Annotated, Final

import typer

from gristmill_cli.local.layout import DATA_DIR_VARIABLE, Layout, find_data_dir
from gristmill_cli.output import Output
from gristmill_sessions.local import LocalStore, open_local_store

DEFAULT_TENANT: Final = "default"

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        envvar=DATA_DIR_VARIABLE,
        show_envvar=True,
        help="Folder of the instance; default ~/.gristmill.",
    ),
]
ENDPOINT_VARIABLE: Final = "GRISTMILL_CLI_ENDPOINT"
LEDGER_URL_VARIABLE: Final = "GRISTMILL_CLI_LEDGER_URL"
CLUSTER_KEY_VARIABLE: Final = "GRISTMILL_CLI_CLUSTER_KEY_FILE"

Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint",
        envvar=ENDPOINT_VARIABLE,
        show_envvar=True,
        help="Gateway of a cluster, as https://gristmill.example.com; the access key is AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY. Empty: the instance of this machine.",
    ),
]
LedgerUrl = Annotated[
    str,
    typer.Option(
        "--ledger-url",
        envvar=LEDGER_URL_VARIABLE,
        show_envvar=True,
        help="Ledger of a cluster. Empty: that of the instance of this machine.",
    ),
]
ClusterKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster-key-file",
        envvar=CLUSTER_KEY_VARIABLE,
        show_envvar=True,
        help="File with the cluster's key, which a cluster's ledger asks for.",
    ),
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")]
Tenant = Annotated[str, typer.Option("--tenant", "-t", help="The tenant to act for.")]


def find_layout(data_dir: Path | None) -> Layout:
    return Layout(find_data_dir(data_dir))


def open_store(layout: Layout) -> LocalStore:
    """The resources of the data folder; made if there are none yet."""
    layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_local_store(layout.store)
