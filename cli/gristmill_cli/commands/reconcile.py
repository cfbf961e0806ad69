"""`gristmill reconcile`: whether worker, meter and ledger say the same, and decisions where they do not."""

import getpass
from pathlib import Path
from typing import Annotated, Final

import typer

from gristmill_cli.cluster.ledger import LedgerAccess, ledger_access
from gristmill_cli.cluster.ledger_json import Json, ask_json
from gristmill_cli.local.instance import require_instance
from gristmill_cli.local.session_names import uid_of
from gristmill_cli.options import (
    ClusterKeyFile,
    DataDir,
    LedgerUrl,
    OutputOption,
    find_layout,
)
from gristmill_cli.output import Output, print_data, print_table, reports_errors, say

app = typer.Typer(
    invoke_without_command=True,
    help="Compare worker, meter and ledger now, to the token. Exit code 2: something differs.",
)

DIFFERENCES_EXIT: Final = 2
"""Exit code where differences are open: they are no failure of the command."""
OfTenant = Annotated[str, typer.Option("--tenant", "-t", help="Only of this tenant.")]
OfSession = Annotated[str, typer.Option(help="Only of the session with this uid or name.")]


@app.callback()
@reports_errors
def reconcile(
    context: typer.Context,
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: OfTenant = "",
    session: OfSession = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Compare worker, meter and ledger now, to the token. Exit code 2: something differs."""
    if context.invoked_subcommand is not None:
        return
    access = _access(data_dir, ledger_url, cluster_key_file)
    session = uid_of(data_dir, ledger_url, tenant, session)
    answer = ask_json(access, "/v1/reconcile", _scope(tenant, session), method="POST")
    answer["differences"] = _rest(access, tenant, session, answer, everything=False)
    if output is not Output.TABLE:
        print_data(answer, output)
    else:
        _print(answer["differences"])
        run = answer["run"]
        say(f"{run['sessions']} sessions compared, {run['in_flight']} with usage under way, "
            f"{run['silent']} whose meter tells nothing; "
            f"{len(answer['differences'])} differences are open")  # fmt: skip
    if answer["differences"]:
        raise typer.Exit(DIFFERENCES_EXIT)


@app.command("list")
@reports_errors
def list_(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: OfTenant = "",
    session: OfSession = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Also those that somebody has decided on.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the differences on record."""
    access = _access(data_dir, ledger_url, cluster_key_file)
    session = uid_of(data_dir, ledger_url, tenant, session)
    first = _page(access, tenant, session, "", everything=everything)
    found = _rest(access, tenant, session, first, everything=everything)
    if output is not Output.TABLE:
        print_data(found, output)
        return
    _print(found)
    if not found:
        say("no difference is on record" if everything else "no difference is open")


@app.command()
@reports_errors
def resolve(
    difference: Annotated[str, typer.Argument(metavar="ID", help="Id of the difference.")],
    *,
    reason: Annotated[str, typer.Option(help="Why it is settled: it goes on record.")],
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
) -> None:
    """Record why a difference is settled, for good."""
    access = _access(data_dir, ledger_url, cluster_key_file)
    asked = {"difference": difference, "reason": reason, "by": getpass.getuser()}
    ask_json(access, "/v1/reconcile/decisions", asked, method="POST")
    say(f"difference {difference} is settled: {reason}")


def _access(data_dir: Path | None, ledger_url: str, cluster_key_file: Path | None) -> LedgerAccess:
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    return ledger_access(url, cluster_key_file)


def _scope(tenant: str, session: str) -> dict[str, str]:
    return {name: value for name, value in (("tenant", tenant), ("session", session)) if value}


def _page(access: LedgerAccess, tenant: str, session: str, after: str, *, everything: bool) -> Json:
    asked = _scope(tenant, session) | ({"after": after} if after else {})
    return ask_json(access, "/v1/reconcile", asked | ({"all": "true"} if everything else {}))


def _rest(
    access: LedgerAccess, tenant: str, session: str, first: Json, *, everything: bool
) -> list[Json]:
    """The differences of the first page and of those behind it."""
    found = list(first["differences"])
    after = first["next_after"]
    while after is not None:
        page = _page(access, tenant, session, after, everything=everything)
        found += page["differences"]
        after = page["next_after"]
    return found


def _print(found: list[Json]) -> None:
    columns = ["ID", "PAIR", "KIND", "TENANT", "SESSION", "SUBJECT", "OPERATIONS", "TOKENS", "AGE",
               "STATE", "DETAIL"]  # fmt: skip
    if found:
        print_table(columns, [_row(each) for each in found], numbers=["OPERATIONS", "TOKENS"])


def _row(found: Json) -> list[object]:
    tokens = [f"{name} {count:+,}" for name, count in found["tokens"].items() if count]
    decision = found["decision"]
    state = "open" if decision is None else f"{decision['by']}: {decision['reason']}"
    return [
        found["id"], found["pair"], found["kind"], found["tenant"], found["session"], found["subject"],
        f"{found['operations']:+,}" if found["operations"] else "", ", ".join(tokens),
        _age(found["age_s"]), state, found["detail"],
    ]  # fmt: skip


def _age(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
