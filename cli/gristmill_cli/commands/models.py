"""`gristmill models`."""

from typing import Annotated, Any

import typer

from gristmill_cli.cluster import views
from gristmill_cli.cluster.gateway import open_gateway
from gristmill_cli.describe import model_lines
from gristmill_cli.errors import CommandError
from gristmill_cli.local.layout import make_folders
from gristmill_cli.models import add_model, engine_path
from gristmill_cli.options import DataDir, Endpoint, OutputOption, find_layout, open_store
from gristmill_cli.output import Output, print_data, print_table, reports_errors, say
from gristmill_contracts.base_model import BaseModelResource
from gristmill_contracts.errors import NotFoundError

app = typer.Typer(no_args_is_help=True, help="Base models that sessions may name.")


@app.command()
@reports_errors
def add(
    name: Annotated[str, typer.Argument(help="What sessions will call it.")],
    source: Annotated[
        str,
        typer.Argument(
            help="A folder, a .gguf file or a Hugging Face repository; empty: known by its name."
        ),
    ] = "",
    data_dir: DataDir = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 (the default).")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Prepare a base model and register it."""
    layout = find_layout(data_dir)
    make_folders(layout)
    model = add_model(open_store(layout), layout, name, source, dtype=dtype, say=say)
    if output is Output.TABLE:
        typer.echo(f"model {name} is ready")
    else:
        print_data(_row(model), output)


@app.command("list")
@reports_errors
def list_(
    data_dir: DataDir = None, endpoint: Endpoint = "", output: OutputOption = Output.TABLE
) -> None:
    """List registered base models."""
    if endpoint:
        show_hub_models(open_gateway(endpoint).models(), output)
        return
    show_models(open_store(find_layout(data_dir)).list(BaseModelResource), output)


@app.command()
@reports_errors
def describe(
    name: Annotated[str, typer.Argument(help="What sessions call it.")],
    data_dir: DataDir = None,
    endpoint: Endpoint = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Tell all about one base model: architecture, context, where it came from, the engine's path, ways to run it."""
    if endpoint:
        _describe_hub_model(open_gateway(endpoint).model(name), output)
        return
    store = open_store(find_layout(data_dir))
    try:
        model = store.get(BaseModelResource, "", name)
    except NotFoundError as error:
        known = ", ".join(each.metadata.name for each in store.list(BaseModelResource)) or "none"
        raise CommandError(f"there is no model {name!r}; known: {known}") from error
    engine = engine_path(model.spec.weights.path)
    if output is Output.TABLE:
        typer.echo("\n".join(model_lines(model, f"{engine.path} path: {engine.why}")))
    else:
        print_data(_row(model) | {"engine": {"path": engine.path, "why": engine.why}}, output)


def _describe_hub_model(model: views.Shape, output: Output) -> None:
    if output is Output.TABLE:
        typer.echo("\n".join(views.model_lines(model)))
    else:
        print_data(views.model_facts(model), output)


def show_hub_models(models: list[views.Shape], output: Output) -> None:
    """Models as a cluster's gateway tells them."""
    if output is not Output.TABLE:
        print_data([views.model_facts(each) for each in models], output)
        return
    print_table(views.MODEL_COLUMNS, views.model_rows(models), numbers=("CONTEXT",))


def show_models(models: list[BaseModelResource], output: Output) -> None:
    if output is not Output.TABLE:
        print_data([_row(model) for model in models], output)
        return
    print_table(
        ("NAME", "ARCHITECTURE", "DTYPE", "CONTEXT", "SOURCE"),
        [
            (
                model.metadata.name,
                model.spec.architecture,
                model.spec.dtype,
                model.spec.context_length,
                model.spec.source,
            )
            for model in models
        ],
        numbers=("CONTEXT",),
    )


def _row(model: BaseModelResource) -> dict[str, Any]:  # Any: JSON
    return {"name": model.metadata.name, **model.spec.model_dump(by_alias=True)}
