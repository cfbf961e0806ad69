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
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")]
Tenant = Annotated[str, typer.Option("--tenant", "-t", help="The tenant to act for.")]


def find_layout(data_dir: Path | None) -> Layout:
    return Layout(find_data_dir(data_dir))


def open_store(layout: Layout) -> LocalStore:
    """The resources of the data folder; made if there are none yet."""
    layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open_local_store(layout.store)
