"""`gristmill budget`: what may be spent, by whom, and what is left of it."""

import getpass
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from gristmill_cli.cluster.budgets import BudgetClient
from gristmill_cli.cluster.ledger import ledger_access
from gristmill_cli.errors import CommandError
from gristmill_cli.local.budget_names import warnings_of
from gristmill_cli.local.instance import require_instance
from gristmill_cli.local.session_names import uid_of
from gristmill_cli.options import (
    DEFAULT_TENANT,
    ClusterKeyFile,
    DataDir,
    LedgerUrl,
    OutputOption,
    Tenant,
    find_layout,
)
from gristmill_cli.output import Output, print_data, print_table, reports_errors, say
from gristmill_contracts import limits
from gristmill_contracts.budgets import TOKENS, BudgetView, Decide, PutBudget, SuspenseView
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.resources import format_time
from gristmill_contracts.units import PICO_PER_UNIT, pico_from_decimal

app = typer.Typer(
    no_args_is_help=True, help="Bound what tenants, projects, sessions and keys may spend."
)

COLUMNS: Final = (
    "NAME", "SCOPE", "MODE", "PERIOD", "UNIT", "LIMIT", "USED", "HELD", "LEFT", "ENDS",
)  # fmt: skip
NUMBERS: Final = ("LIMIT", "USED", "HELD", "LEFT")
AllTenants = Annotated[str, typer.Option("--tenant", "-t", help="Only of this tenant.")]
Name = Annotated[str, typer.Argument(help="Name of the budget.")]


class Scope(StrEnum):
    """Whose usage is bounded."""

    TENANT = "tenant"
    PROJECT = "project"
    SESSION = "session"
    KEY = "key"


class Mode(StrEnum):
    """What happens at the limit."""

    HARD = "hard"
    SOFT = "soft"


class Recurrence(StrEnum):
    """When it begins anew."""

    ONCE = "once"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@app.command("list")
@reports_errors
def list_(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: AllTenants = "",
    ended: Annotated[bool, typer.Option(help="Also those that have ended.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """List budgets with what is used and left of their running periods."""
    client = _client(data_dir, ledger_url, cluster_key_file)
    budgets = client.budgets(tenant=tenant, ended=ended)
    if output is not Output.TABLE:
        print_data([_data(each) for each in budgets], output)
    elif not budgets:
        say("no budgets: nothing is bounded. Make one with `gristmill budget set`")
    else:
        print_table(COLUMNS, [_row(each) for each in budgets], numbers=NUMBERS)


@app.command()
@reports_errors
def get(
    name: Name,
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one budget and its running period."""
    budget = _client(data_dir, ledger_url, cluster_key_file).get(tenant, name)
    _print(budget, output, warnings_of(budget, data_dir, ledger_url))


@app.command("set")
@reports_errors
def set_(
    name: Name,
    limit: Annotated[
        str, typer.Argument(help="Tokens as 5000000, or money as 250.00. 0 = nothing may be spent.")
    ],
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: Tenant = DEFAULT_TENANT,
    scope_type: Annotated[
        Scope | None, typer.Option("--scope-type", help="Whose usage; default: the tenant's.")
    ] = None,
    scope: Annotated[
        str,
        typer.Option(help="Name of the project, uid (or name) of the session, or id of the key."),
    ] = "",
    unit: Annotated[
        str, typer.Option(help="tokens, or a currency such as USD; default: tokens.")
    ] = "",
    mode: Annotated[
        Mode | None, typer.Option(help="hard: operations wait at the limit; soft: it is only told.")
    ] = None,
    every: Annotated[
        Recurrence | None, typer.Option("--every", help="once, or anew each day, week or month.")
    ] = None,
    time_zone: Annotated[
        str, typer.Option(help="Where days begin, as Europe/Amsterdam; default: UTC.")
    ] = "",
    threshold: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=100, help="Percent of the limit to be told of; default: 50, 80 and 100."
        ),
    ] = None,
    block: Annotated[
        bool,
        typer.Option("--block", help="Take a limit below what is used: nothing more is spent."),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a budget, or change its limit, mode and thresholds. What is left out stays as it is."""
    client = _client(data_dir, ledger_url, cluster_key_file)
    known = _known(client, tenant, name)
    unit = unit or (known.unit if known else TOKENS)
    kind = scope_type.value if scope_type else (known.scope_type if known else "tenant")
    if kind == "session":
        scope = uid_of(data_dir, ledger_url, tenant, scope)
    put = PutBudget(
        scope_type=kind,
        scope=scope or (known.scope if known else (tenant if kind == "tenant" else "")),
        unit=unit,
        limit=_amount(limit, unit),
        mode=mode.value if mode else (known.mode if known else "hard"),
        recurrence=every.value if every else (known.recurrence if known else "once"),
        time_zone=time_zone or (known.time_zone if known else "UTC"),
        thresholds=tuple(threshold)
        if threshold
        else (known.thresholds if known else (50, 80, 100)),
        below_posted="block" if block else "refuse",
    )
    budget = client.put(tenant, name, put)
    _print(budget, output, warnings_of(budget, data_dir, ledger_url))


@app.command()
@reports_errors
def end(
    name: Name,
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """End a budget: it bounds nothing from now on. What was used of it stays on record."""
    _client(data_dir, ledger_url, cluster_key_file).end(tenant, name)
    say(f"budget {tenant}/{name} has ended")


@app.command()
@reports_errors
def suspense(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: AllTenants = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """List what meters held and nobody has accounted for. It counts against its budget until then."""
    found = _client(data_dir, ledger_url, cluster_key_file).suspense(tenant=tenant)
    if output is not Output.TABLE:
        print_data([_suspended(each) for each in found], output)
    elif not found:
        say("nothing is in suspense")
    else:
        rows = [
            [each.lease, each.budget, each.session, each.attempt, show(each.unit, each.amount),
             each.unit, format_time(each.since_us), each.reason]
            for each in found
        ]  # fmt: skip
        columns = ["LEASE", "BUDGET", "SESSION", "ATTEMPT", "AMOUNT", "UNIT", "SINCE", "REASON"]
        print_table(columns, rows, numbers=["ATTEMPT", "AMOUNT"])


@app.command()
@reports_errors
def resolve(
    lease: Annotated[str, typer.Argument(help="As `gristmill budget suspense` shows it.")],
    budget: Annotated[str, typer.Argument(help="TENANT/NAME, as shown there.")],
    *,
    reason: Annotated[str, typer.Option(help="Why; it is recorded.")],
    spent: Annotated[
        bool | None,
        typer.Option("--spent/--unspent", help="Count all of it as used, or free all of it."),
    ] = None,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
) -> None:
    """Decide on what is in suspense, for good: it was spent, or it was not."""
    tenant, _, name = budget.partition("/")
    if not name:
        raise CommandError(f"{budget!r} is not TENANT/NAME; see `gristmill budget suspense`")
    if spent is None:
        raise CommandError("say what is decided: --spent, or --unspent")
    decision = Decide(kind="post" if spent else "void", reason=reason, by=getpass.getuser())
    client = _client(data_dir, ledger_url, cluster_key_file)
    client.decide(lease, tenant, name, decision)
    say(f"what lease {lease} held of {budget} was {'spent' if spent else 'not spent'}: recorded")


def _client(data_dir: Path | None, ledger_url: str, cluster_key_file: Path | None) -> BudgetClient:
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    return BudgetClient(ledger_access(url, cluster_key_file))


def _known(client: BudgetClient, tenant: str, name: str) -> BudgetView | None:
    try:
        return client.get(tenant, name)
    except NotFoundError:
        return None


def _amount(text: str, unit: str) -> int:
    """Raises CommandError for what is no amount of the unit."""
    try:
        amount = int(text) if unit == TOKENS else pico_from_decimal(text)
    except ValueError as error:
        raise CommandError(
            f"limit {text!r} is no amount: write tokens as 5000000, or money as 250.00 with --unit USD"
        ) from error
    if amount < 0:
        raise CommandError(
            f"limit {text!r} is below 0; the least is 0, which lets nothing be spent"
        )
    if amount > limits.QUANTITY_MAX:
        most = show(unit, limits.QUANTITY_MAX)
        raise CommandError(f"limit {text[:40]!r} is more than a budget holds: {most} {unit}")
    return amount


def show(unit: str, amount: int) -> str:
    """An amount for people: tokens with separators, money exact to the last digit that is not 0."""
    if unit == TOKENS:
        return f"{amount:,}"
    sign, units, rest = "-" if amount < 0 else "", *divmod(abs(amount), PICO_PER_UNIT)
    decimals = f"{rest:012d}"
    return f"{sign}{units:,}.{decimals[:2]}{decimals[2:].rstrip('0')}"


def _print(budget: BudgetView, output: Output, warnings: Sequence[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")
    if output is not Output.TABLE:
        print_data(_data(budget) | {"warnings": [*warnings]}, output)
        return
    print_table(COLUMNS, [_row(budget)], numbers=NUMBERS)
    period = budget.period
    if period.suspense:
        say(
            f"{show(budget.unit, period.suspense)} are in suspense: held by meters that went silent; see "
            "`gristmill budget suspense`"
        )
    if budget.source == "resource":
        say("it comes from the spec.budget of a resource, and is changed there alone")


def _row(each: BudgetView) -> list[object]:
    period = each.period
    every: str = each.recurrence
    if each.recurrence != "once" and each.time_zone != "UTC":
        every = f"{each.recurrence} ({each.time_zone})"
    ends = "" if period.end_us is None else format_time(period.end_us)
    used = period.posted + period.late_posted
    amounts = (period.limit, used, period.reserved + period.suspense, period.available)
    scope = f"{each.scope_type} {each.scope}"
    shown = [show(each.unit, amount) for amount in amounts]
    return [each.id, scope, each.mode, every, each.unit, *shown, "ended" if each.ended else ends]


def _data(each: BudgetView) -> dict[str, Any]:  # Any: JSON
    """Integers as the ledger holds them, and texts for people beside those that are money."""
    data: dict[str, Any] = msgspec.to_builtins(each)
    period = each.period
    data["shown"] = {
        "limit": show(each.unit, period.limit),
        "used": show(each.unit, period.posted + period.late_posted),
        "held": show(each.unit, period.reserved + period.suspense),
        "left": show(each.unit, period.available),
    }
    return data


def _suspended(each: SuspenseView) -> dict[str, Any]:  # Any: JSON
    data: dict[str, Any] = msgspec.to_builtins(each)
    return data | {"shown": show(each.unit, each.amount)}
