"""`gristmill up`."""

import asyncio
from typing import Annotated

import typer

from gristmill_cli.errors import CommandError
from gristmill_cli.local.instance import take_lock
from gristmill_cli.local.layout import make_folders
from gristmill_cli.local.up import UpOptions, prepare, serve
from gristmill_cli.options import DataDir, find_layout
from gristmill_cli.output import reports_errors
from gristmill_contracts.telemetry import setup_json_logging


@reports_errors
def up(
    *,
    data_dir: DataDir = None,
    host: Annotated[str, typer.Option(help="Address the gateway listens on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65_535, help="Port of the gateway; 0 takes a free one. Default 8450."
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Base model to have ready: its name, a folder, a GGUF file, a repository."
        ),
    ] = "",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16, where the model is prepared now.")
    ] = None,
    idle_stop_s: Annotated[
        float, typer.Option(min=0, help="Stop the worker of a model unused for so many seconds.")
    ] = 300.0,
) -> None:
    """Run everything on this machine: gateway, ledger, and a meter and a worker per base model in use."""
    layout = find_layout(data_dir)
    try:
        make_folders(layout)
    except OSError as error:
        raise CommandError(f"data folder {layout.root} cannot be made: {error}") from error
    with (
        take_lock(layout),
        (layout.logs / "up.log").open("a", encoding="utf-8") as log,
    ):
        setup_json_logging("up", stream=log)
        options = UpOptions(
            host=host, port=port, model=model, dtype=dtype, idle_group_stop_s=idle_stop_s
        )
        store, name = prepare(layout, options, typer.echo)
        asyncio.run(serve(layout, store, name, options, typer.echo))
