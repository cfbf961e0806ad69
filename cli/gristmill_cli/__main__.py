"""`gristmill`, or `python -m gristmill_cli`."""

import typer

from gristmill_cli.commands import (
    adjust,
    budget,
    charges,
    env,
    estimate,
    keys,
    models,
    reconcile,
    resources,
    status,
    up,
    usage,
    verify,
)

app = typer.Typer(
    name="gristmill",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Token-metered LLM training sessions on this machine.",
)
app.command()(up.up)
app.command()(env.env)
app.command()(resources.apply)
app.command()(resources.get)
app.command()(resources.describe)
app.command()(resources.delete)
app.command()(usage.usage)
app.command()(verify.verify)
app.command()(charges.explain)
app.command()(charges.rerate)
app.command()(adjust.adjust)
app.command()(estimate.estimate)
app.command()(status.status)
app.command("doctor", hidden=True)(status.status)
app.add_typer(budget.app, name="budget")
app.add_typer(reconcile.app, name="reconcile")
app.add_typer(models.app, name="models")
app.add_typer(keys.app, name="keys")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
