"""How commands answer: a table for people, JSON or YAML for programs, one line for an error."""

import json
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import wraps
from typing import Any, Final, ParamSpec

import typer
import yaml
from rich.console import Console
from rich.table import Table

from gristmill_contracts.errors import GristmillError

P = ParamSpec("P")
Rows = Sequence[Sequence[object]]
WIDTH_PLAIN: Final = 400
"""Columns where the output is no terminal: lines must not be folded."""


class Output(StrEnum):
    """Formats of most commands."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def print_data(data: Any, output: Output) -> None:  # Any: JSON
    """As JSON or YAML."""
    if output is Output.JSON:
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        typer.echo(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), nl=False)


def print_table(columns: Sequence[str], rows: Rows, *, numbers: Sequence[str] = ()) -> None:
    """A table without borders, as kubectl prints it. `numbers`: columns to align to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console().print(table)


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_PLAIN
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """A line for the person, apart from the data: on standard error."""
    typer.echo(text, err=True)


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Turn our errors into one line on standard error and exit code 1."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except GristmillError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(1) from error
        except BrokenPipeError:
            raise typer.Exit(1) from None

    return wrapped
