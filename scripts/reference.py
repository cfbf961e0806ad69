"""Write the generated pages of docs/reference from the code; --check only compares.

limits.md from gristmill_contracts.limits, errors.md from its tree of errors, settings.md from each
process's settings class, metrics.md from gristmill_contracts.metric_shapes and what makes them,
cli.md from the commands. The text is what stands below each name in the code.
"""

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic_core import PydanticUndefined

from gristmill_contracts import errors, limits, metric_shapes, metrics

FOLDER = Path(__file__).resolve().parents[1] / "docs/reference"
NOTE = "This page is made from the code by `make docs`.\n"
SETTINGS = {
    "operator": "gristmill_operator.settings",
    "gateway": "gristmill_gateway.settings",
    "meter": "gristmill_meter.settings",
    "ledger": "gristmill_ledger.settings",
    "worker": "gristmill_worker.settings",
}


def texts_below(body: list[ast.stmt]) -> Iterator[tuple[int, str, str]]:
    """(line, name, the string below it) of every annotated name, in order."""
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            yield node.lineno, node.target.id, text.replace("|", "/")


def table(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"


# --- limits --------------------------------------------------------------------------------------


def shown(name: str, value: Any) -> str:
    """A number as people read it: whole powers of two of bytes as KiB, MiB, GiB."""
    if "BYTES" in name:
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size and value % size == 0:
                return f"{value // size:,} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def limits_page() -> str:
    source = inspect.getsource(limits)
    headings = [
        (number, line.strip("# -"))
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("# ---")
    ]
    parts = [f"# Limits\n\nEvery bound has a name with its unit in it. {NOTE}"]
    for line, name, text in texts_below(ast.parse(source).body):
        while headings and headings[0][0] < line:
            title = headings.pop(0)[1]
            parts.append(
                f"\n## {title[0].upper()}{title[1:]}\n\n{table('name', 'value', 'meaning')}"
            )
        parts.append(f"| `{name}` | {shown(name, getattr(limits, name))} | {text} |\n")
    return "".join(parts)


# --- errors --------------------------------------------------------------------------------------


def tree(root: type[errors.GristmillError]) -> list[type[errors.GristmillError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]


def errors_page() -> str:
    rows = [
        f"| `{error.code}` | {'yes' if error.retryable else 'no'} | {inspect.getdoc(error)} |\n"
        for error in tree(errors.GristmillError)
        if error.__module__ == errors.__name__
    ]
    head = (
        "# Errors\n\nWhat our processes tell each other, and what an operation that failed carries."
        f" A code never changes once released; messages may. {NOTE}\n"
    )
    return head + table("code", "may succeed when sent again", "meaning") + "".join(rows)


# --- settings ------------------------------------------------------------------------------------


def default_of(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    return "empty" if value == "" else f"`{value}`"


def settings_of(part: str, module_name: str) -> str:
    module = importlib.import_module(module_name)
    prefix = module.ENV_PREFIX
    found = next(
        value
        for name, value in vars(module).items()
        if name.endswith("Settings") and name.lower() == f"{part}settings"
    )
    body = ast.parse(inspect.getsource(found)).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = [
        f"| `{prefix}{name.upper()}` | {default_of(found.model_fields[name])} | {text} |\n"
        for _, name, text in texts_below(body.body)
        if name in found.model_fields
    ]
    return f"\n## {part}\n\n{table('variable', 'default', 'meaning')}{''.join(rows)}"


def settings_page() -> str:
    head = (
        "# Settings\n\nEvery process reads its environment once, at its start, and `--help` lists "
        f"the same. `gristmill up` sets them for the processes that it starts. {NOTE}"
    )
    return head + "".join(settings_of(part, name) for part, name in SETTINGS.items())


# --- metrics -------------------------------------------------------------------------------------

METRIC_PACKAGES = {
    "operator": "operator/gristmill_operator",
    "gateway": "gateway/gristmill_gateway",
    "meter": "billing/gristmill_meter",
    "ledger": "billing/gristmill_ledger",
    "worker": "worker/gristmill_worker",
}


def metric_texts(source: str) -> Iterator[tuple[str, str]]:
    """(name, what it means) of every call that makes a metric: its name from the contract, and a text, come first."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        constant, text = node.args[:2]
        if not isinstance(constant, ast.Attribute) or not isinstance(text, ast.Constant):
            continue
        if hasattr(metrics, constant.attr):
            yield getattr(metrics, constant.attr), str(text.value)


def metrics_page() -> str:
    parts = [
        "# Metrics\n\nEvery process answers `/metrics` in Prometheus' text format. No label is a session, a user or a "
        "request. Tenants, models and budgets come from configuration; past 200 of them the rest is `other`, and "
        f"`{metrics.LABEL_OVERFLOW}` counts it. {NOTE}"
    ]
    for part, shapes in metric_shapes.SHAPES.items():
        paths = sorted((FOLDER.parents[1] / METRIC_PACKAGES[part]).rglob("*.py"))
        texts = dict(pair for path in paths for pair in metric_texts(path.read_text()))
        parts.append(f"\n## {part}\n\n{table('name', 'kind', 'labels', 'meaning')}")
        for name, shape in shapes.items():
            listed = ", ".join(f"`{label}`" for label in shape.labels)
            parts.append(f"| `{name}` | {shape.kind} | {listed} | {texts[name]} |\n")
    return "".join(parts)


# --- command line --------------------------------------------------------------------------------


def commands_in(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(its words, the command) of every command that does something, in order."""
    below = getattr(command, "commands", None)
    if below is None or command.invoke_without_command:
        yield path, command
    for name, child in (below or {}).items():
        yield from commands_in(child, f"{path} {name}")


def parameter_row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{(parameter.metavar or parameter.name).upper()}`"
    default = parameter.default
    if callable(default) or default in (None, "", False) or parameter.required:
        shown_default = "required" if parameter.required else ""
    else:
        shown_default = f"`{getattr(default, 'value', default)}`"
    text = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "/")
    return f"| {names} | {shown_default} | {text} |\n"


def cli_page() -> str:
    from gristmill_cli.__main__ import app

    parts = [
        "# Command line\n\nCommands find a running instance by its data folder: `--data-dir`, else "
        "`GRISTMILL_DATA_DIR`, else `~/.gristmill`. A cluster is asked where `--endpoint` names its gateway "
        "(with a tenant's access key) or `--ledger-url` its ledger (with the cluster's key); the environment may say "
        f"so by `GRISTMILL_CLI_ENDPOINT`, `GRISTMILL_CLI_LEDGER_URL` and `GRISTMILL_CLI_CLUSTER_KEY_FILE`. {NOTE}"
    ]
    for words, command in commands_in(typer.main.get_command(app), "gristmill"):
        text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
        rows = [parameter_row(p) for p in command.params if p.name != "help"]
        parts.append(f"\n## {words}\n\n{text}\n\n{table('option', 'default', 'meaning')}")
        parts += rows
    return "".join(parts)


PAGES = {
    "cli.md": cli_page,
    "limits.md": limits_page,
    "errors.md": errors_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    only_compare = parser.parse_args().check
    stale = [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != page()
    ]
    for name in stale:
        if only_compare:
            print(f"docs/reference/{name} is out of date: run `make docs`")
        else:
            (FOLDER / name).write_text(PAGES[name]())
    return 1 if stale and only_compare else 0


if __name__ == "__main__":
    sys.exit(main())
