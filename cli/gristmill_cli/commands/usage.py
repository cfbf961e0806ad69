"""`gristmill usage`: what was used and what it cost, as the ledger answers it."""

import csv
import json
import sys
from enum import StrEnum
from typing import Annotated, Final

import typer

from gristmill_cli.cluster.ledger import LedgerAccess, ledger_access
from gristmill_cli.cluster.ledger_json import Json, ask_json
from gristmill_cli.local.instance import require_instance
from gristmill_cli.local.session_names import uid_of
from gristmill_cli.options import ClusterKeyFile, DataDir, LedgerUrl, find_layout
from gristmill_cli.output import print_table, reports_errors, say
from gristmill_contracts.units import PICO_PER_UNIT
from gristmill_contracts.usage import TOKEN_TYPES

MEASURES: Final = (*TOKEN_TYPES, "total", "operations")


class UsageOutput(StrEnum):
    """Formats of this command."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@reports_errors
def usage(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Only of this tenant.")] = "",
    project: Annotated[str, typer.Option(help="Only of this project.")] = "",
    session: Annotated[str, typer.Option(help="Only of the session with this uid or name.")] = "",
    key: Annotated[str, typer.Option(help="Only with this access key, named by its id.")] = "",
    model: Annotated[str, typer.Option(help="Only of this base model.")] = "",
    operation: Annotated[str, typer.Option(help="Only of this kind of operation.")] = "",
    token_type: Annotated[
        str, typer.Option(help="Only prefill, cached_prefill, sample or train.")
    ] = "",
    group_by: Annotated[
        str,
        typer.Option(
            help="Keys, with commas: tenant, project, session, key, model, operation, token_type."
        ),
    ] = "",
    bucket: Annotated[str, typer.Option(help="none, minute, hour, day or month.")] = "none",
    zone: Annotated[
        str, typer.Option(help="Whose days and months, as Europe/Amsterdam; default UTC.")
    ] = "",
    since: Annotated[str, typer.Option(help="From this time on, ISO 8601.")] = "",
    until: Annotated[str, typer.Option(help="Until before this time, ISO 8601.")] = "",
    attempts: Annotated[
        bool, typer.Option("--include-attempts", help="Also what ran and was not billed.")
    ] = False,
    output: Annotated[UsageOutput, typer.Option("--output", "-o")] = UsageOutput.TABLE,
) -> None:
    """Show used tokens and their cost, exact to the token."""
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    access = ledger_access(url, cluster_key_file)
    parameters = {
        "tenant": tenant,
        "project": project,
        "session": uid_of(data_dir, ledger_url, tenant, session),
        "key": key,
        "model": model,
        "operation": operation,
        "token_type": token_type,
        "zone": zone,
        "group_by": group_by,
        "bucket": bucket,
        "since": since,
        "until": until,
        "include_attempts": "true" if attempts else "",
    }
    answer = read_usage(access, {k: v for k, v in parameters.items() if v})
    keys = key_columns(group_by, bucket, attempts=attempts)
    if output is UsageOutput.JSON:
        typer.echo(json.dumps({**answer, "totals": totals(answer["rows"])}, indent=2))
    elif output is UsageOutput.CSV:
        _print_csv(answer, keys)
    else:
        _print_table(answer, keys)


def read_usage(ledger: LedgerAccess, parameters: dict[str, str]) -> Json:
    """All pages of one question. Raises the ledger's error."""
    rows: list[Json] = []
    answer: Json = {}
    cursor: str | None = None
    while not answer or cursor is not None:
        query = {**parameters, **({"cursor": cursor} if cursor else {})}
        answer = ask_json(ledger, "/v1/usage", query)
        rows += answer["rows"]
        cursor = answer["next_cursor"]
    return {**answer, "rows": rows}


def key_columns(group_by: str, bucket: str, *, attempts: bool) -> list[str]:
    """The columns that name a row."""
    names = [name.strip() for name in group_by.split(",") if name.strip()]
    if "session" in names:
        names.insert(names.index("session"), "session_name")
    return [
        *(["bucket_start"] if bucket != "none" else []),
        *names,
        *(["kind"] if attempts else []),
    ]


def totals(rows: list[Json]) -> Json:
    """Sums over the rows. Unknown in one row is unknown in the sum: null, never 0."""
    summed: Json = {}
    for name in (*MEASURES, "cost_pico"):
        values = [row[name] for row in rows]
        summed[name] = None if None in values else sum(values)
    pico = summed["cost_pico"]
    summed["cost"] = None if pico is None else exact_decimal(pico)
    return summed


def exact_decimal(pico: int) -> str:
    """Pico-units as units: at least 6 decimals, up to 12 where they are needed."""
    units, rest = divmod(abs(pico), PICO_PER_UNIT)
    decimals = f"{rest:012d}"
    sign = "-" if pico < 0 else ""
    return f"{sign}{units}.{decimals[:6]}{decimals[6:].rstrip('0')}"


def _print_csv(answer: Json, keys: list[str]) -> None:
    columns = [*keys, *MEASURES, "operations_unknown", "cost", "currency"]
    writer = csv.writer(sys.stdout)
    writer.writerow(columns)
    for row in answer["rows"]:
        values = {**row, "currency": answer["currency"]}
        writer.writerow(["" if values[name] is None else values[name] for name in columns])


def _print_table(answer: Json, keys: list[str]) -> None:
    cost = f"COST {answer['currency'] or ''}".strip()
    numbers = [*(name.upper() for name in MEASURES), cost]
    rows = [[row[key] for key in keys] + _measures(row) for row in answer["rows"]]
    if keys and len(rows) > 1:
        rows.append(["TOTAL", *[""] * (len(keys) - 1), *_measures(totals(answer["rows"]))])
    print_table([*(key.upper() for key in keys), *numbers], rows, numbers=numbers)
    if not rows:
        say("no usage is as asked for: check names and times, or ask for less")
    lost = answer.get("lost_count", 0)
    if lost:
        typer.echo(f"note: {lost} gaps are on record; --output json shows what was lost", err=True)
    reasons = {row["cost_reason"] for row in answer["rows"] if row.get("cost_reason")}
    for reason in sorted(reasons):
        typer.echo(f"note: {reason}", err=True)


def _measures(row: Json) -> list[str]:
    counts = ["unknown" if row[name] is None else f"{row[name]:,}" for name in MEASURES]
    return [*counts, "unknown" if row["cost"] is None else row["cost"]]
