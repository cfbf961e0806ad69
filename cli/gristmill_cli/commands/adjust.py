"""`gristmill adjust`: correct what one operation was charged, for the record."""

import getpass
from typing import Annotated

import typer

from gristmill_cli.cluster.ledger import ledger_access
from gristmill_cli.cluster.ledger_json import ask_json
from gristmill_cli.local.instance import require_instance
from gristmill_cli.options import (
    ClusterKeyFile,
    DataDir,
    LedgerUrl,
    OutputOption,
    find_layout,
)
from gristmill_cli.output import Output, print_data, reports_errors, say


@reports_errors
def adjust(
    event: Annotated[str, typer.Argument(help="Id of the usage event; `explain` has it.")],
    *,
    reason: Annotated[str, typer.Option(help="Why: it goes on record.")],
    void: Annotated[bool, typer.Option("--void", help="Take away all that is left.")] = False,
    prefill: Annotated[int, typer.Option(help="Tokens to add, or below 0 to take away.")] = 0,
    cached_prefill: Annotated[int, typer.Option(help="The same.")] = 0,
    sample: Annotated[int, typer.Option(help="The same.")] = 0,
    train: Annotated[int, typer.Option(help="The same.")] = 0,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Whose event.")] = "",
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Correct an operation's tokens by a row of its own; what is stored stays."""
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    asked: dict[str, str] = {
        "event": event,
        "reason": reason,
        "by": getpass.getuser(),
        "tenant": tenant,
        "kind": "void" if void else "adjustment",
        "prefill": str(prefill),
        "cached_prefill": str(cached_prefill),
        "sample": str(sample),
        "train": str(train),
    }
    given = {name: value for name, value in asked.items() if value}
    access = ledger_access(url, cluster_key_file)
    made = ask_json(access, "/v1/corrections", given, method="POST")
    if output is not Output.TABLE:
        print_data(made, output)
        return
    left = ", ".join(f"{name} {tokens:,}" for name, tokens in made["left"].items() if tokens)
    what = "was on record already" if made["again"] else f"is row {made['seq']} of {made['tenant']}"
    say(f"{made['kind']} {made['event_id']} {what}; {left or 'nothing'} is left of {event}")
