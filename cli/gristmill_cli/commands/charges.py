"""`gristmill explain` and `gristmill rerate`: what charges are made of, and rating them again."""

from typing import Annotated, Any, Final

import typer

from gristmill_cli.cluster.ledger import LedgerAccess, ledger_access
from gristmill_cli.cluster.ledger_json import Json, ask_json
from gristmill_cli.commands.usage import exact_decimal
from gristmill_cli.errors import CommandError
from gristmill_cli.local.instance import require_instance
from gristmill_cli.local.session_names import uid_of
from gristmill_cli.options import ClusterKeyFile, DataDir, LedgerUrl, find_layout
from gristmill_cli.output import Output, print_data, print_table, reports_errors, say
from gristmill_contracts.errors import NotFoundError
from gristmill_contracts.resources import format_time

OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")]
HASH_SHOWN: Final = 12


@reports_errors
def explain(
    target: Annotated[
        str,
        typer.Argument(metavar="EVENT|SESSION", help="Id of an event, uid or name of a session."),
    ],
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Whose event or session.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Explain charges: the operation, its tokens, the price rows and the place in the chain."""
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    access = ledger_access(url, cluster_key_file)
    named = {"tenant": tenant} if tenant else {}
    try:
        answer = ask_json(access, "/v1/explain", named | {"event": target})
    except NotFoundError:
        uid = uid_of(data_dir, ledger_url, tenant, target)
        answer = _session(access, named, uid)
    if output is not Output.TABLE:
        print_data(answer, output)
        return
    _print_charges(answer, target)


def _session(access: LedgerAccess, named: dict[str, str], uid: str) -> Json:
    """All pages. Totals are of all charges; unknown in one is unknown in the sum."""
    answer: Json = {}
    charges: list[Json] = []
    totals: list[int | None] = []
    unknown, after = 0, "0"
    while not answer or answer["next_after"] is not None:
        answer = ask_json(access, "/v1/explain", named | {"session": uid, "after": after})
        charges += answer["charges"]
        totals.append(answer["total_pico"])
        unknown += answer["operations_unknown"]
        after = str(answer["next_after"])
    total = None if None in totals else sum(each for each in totals if each is not None)
    return answer | {
        "charges": charges,
        "total_pico": total,
        "total": None if total is None else exact_decimal(total),
        "operations_unknown": unknown,
    }


def _print_charges(answer: Json, target: str) -> None:
    if not answer["charges"]:
        say("no charges: the session has run nothing that was posted yet")
        return
    first, *others = answer["charges"]
    if not others or first["event_id"] == target:
        _print_charge(first)
        _print_corrections(others, answer)
        return
    rows = [
        [each["chain"]["seq"], each["op_start"], f"{each['stream']}/{each['number']}",
         each["operation"], *_cells(each), each["state"], each["event_id"]]
        for each in answer["charges"]
    ]  # fmt: skip
    columns = ["SEQ", "STARTED", "OPERATION", "KIND", "TOKENS", "COST", "STATE", "EVENT"]
    print_table(columns, rows, numbers=["SEQ", "TOKENS", "COST"])
    total = "unknown" if answer["total"] is None else answer["total"]
    say(f"{len(rows)} charges, {total} {answer['currency'] or ''}".strip())
    if answer["operations_unknown"]:
        say(f"note: the usage of {answer['operations_unknown']} operations is unknown")
    if answer["lost_count"]:
        say(f"note: {answer['lost_count']} gaps are on record; --output json shows what was lost")


def _print_charge(charge: Json) -> None:
    chain = charge["chain"]
    facts = [
        ("event", f"{charge['event_id']} ({charge['kind']})"),
        ("session", f"{charge['session_name'] or ''} {charge['session']}".strip()),
        ("tenant, project", f"{charge['tenant']}, {charge['project'] or '-'}"),
        ("access key", charge["key"] or "-"),
        ("operation", f"{charge['operation']} {charge['stream']}/{charge['number']} of "
                      f"{charge['model']}, {charge['outcome']}"),
        ("started", charge["op_start"] or str(charge["op_start_us"])),
        ("chain", f"{chain['tenant']} row {chain['seq']}, {chain['hash'][:HASH_SHOWN]} after "
                  f"{chain['prev_hash'][:HASH_SHOWN]}"),
        ("odd", charge["quarantined"] or "-"),
        *_correction(charge),
        ("state", charge["state"]),
    ]  # fmt: skip
    for name, value in facts:
        typer.echo(f"{name + ':':<17}{value}")
    rows = [_line(each) for each in charge["lines"]]
    if rows:
        columns = ["TOKEN_TYPE", "TOKENS", "PRICE/1M", "BOOK", "OF", "FROM", "COST"]
        print_table(columns, rows, numbers=["TOKENS", "PRICE/1M", "COST"])
    for each in charge["ratings"]:
        if each["run"]:
            pico = each["amount_pico"]
            amount = "unknown" if pico is None else exact_decimal(pico)
            typer.echo(f"rated again by run {each['run']} ({each['reason']}): {amount}")
    total = "unknown" if charge["amount"] is None else charge["amount"]
    typer.echo(f"{'cost:':<17}{total} {charge['currency'] or ''}".rstrip())


def _print_corrections(corrections: list[Json], answer: Json) -> None:
    """Of the one charge that was asked for, and what is left of it with them."""
    for each in corrections:
        tokens = [f"{name} {count:+,}" for name, count in (each["tokens"] or {}).items() if count]
        amount = "unknown" if each["amount"] is None else each["amount"]
        typer.echo(f"corrected by row {each['chain']['seq']}, {each['event_id']}: {', '.join(tokens)} "
                   f"({each['reason']}): {amount}")  # fmt: skip
    if corrections:
        total = "unknown" if answer["total"] is None else answer["total"]
        typer.echo(f"{'with these:':<17}{total} {answer['currency'] or ''}".rstrip())


def _correction(charge: Json) -> list[tuple[str, str]]:
    if not charge["corrects"]:
        return []
    return [("corrects", charge["corrects"]), ("decided by", charge["reason"])]


def _line(line: Json) -> list[Any]:
    price = line["price"]
    if price is None:
        return [line["token_type"], f"{line['tokens']:,}", "none", "", "", "", "unknown"]
    per_million = exact_decimal(price["micros_per_mtok"] * 10**6)
    return [
        line["token_type"], f"{line['tokens']:,}", per_million, price["book"], price["model"],
        _since(price["effective_from_us"]), exact_decimal(line["amount_pico"]),
    ]  # fmt: skip


def _since(from_us: int) -> str:
    """When a price began; as it is stored where that is beyond a calendar's years."""
    if not from_us:
        return "ever"
    try:
        return format_time(from_us)
    except (ValueError, OverflowError):
        return str(from_us)


def _cells(charge: Json) -> list[str]:
    tokens = "unknown" if charge["total"] is None else f"{charge['total']:,}"
    return [tokens, "unknown" if charge["amount"] is None else charge["amount"]]


# --- again ---------------------------------------------------------------------------------------


@reports_errors
def rerate(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    reason: Annotated[str, typer.Option(help="Why: it goes on record.")],
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Only of this tenant.")] = "",
    book: Annotated[str, typer.Option(help="Only what this price book prices.")] = "",
    since: Annotated[str, typer.Option(help="From this time on, ISO 8601.")] = "",
    until: Annotated[str, typer.Option(help="Until before this time, ISO 8601.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell, and change nothing.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Rate usage again by the prices of today's books; adds differences, changes nothing."""
    url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
    access = ledger_access(url, cluster_key_file)
    asked = {
        "reason": reason,
        "tenant": tenant,
        "book": book,
        "since": since,
        "until": until,
        "dry_run": "true" if dry_run else "",
    }
    found = _rerate(access, {name: value for name, value in asked.items() if value})
    if output is not Output.TABLE:
        print_data(found, output)
        return
    rows = [
        [each["tenant"], each["currency"] or "", each["difference"]]
        for each in found["differences"]
    ]
    print_table(["TENANT", "CURRENCY", "DIFFERENCE"], rows, numbers=["DIFFERENCE"])
    what = "would be rated again" if dry_run else f"rated again by run {found['run']}"
    say(f"{found['rows']} operations {what}" if found["rows"] else "nothing has other prices now")
    if found["unpriced"]:
        say(f"note: {found['unpriced']} of them still have no amount")
    if found["other_currency"]:
        say(f"note: {found['other_currency']} are priced in another currency now, and were left")


def _rerate(access: LedgerAccess, asked: dict[str, str]) -> Json:
    """All parts of a run, added up."""
    counts = dict.fromkeys(("rows", "hours", "unpriced", "other_currency"), 0)
    sums: dict[tuple[str, str | None], int] = {}
    following: dict[str, str] = {}
    while True:
        try:
            part = ask_json(access, "/v1/rerate", asked | following, method="POST")
        except CommandError as error:
            raise CommandError(
                f"{error.message}; what was rated again stays, ask again for the rest"
            ) from error
        for name in counts:
            counts[name] += part[name]
        for each in part["differences"]:
            place = (each["tenant"], each["currency"])
            sums[place] = sums.get(place, 0) + each["difference_pico"]
        if part["run"] is not None:
            following["run"] = str(part["run"])
        if part["next"] is None:
            break
        following["next"] = part["next"]
    differences = [
        {"tenant": tenant, "currency": currency, "difference_pico": pico,
         "difference": exact_decimal(pico)}
        for (tenant, currency), pico in sums.items()
    ]  # fmt: skip
    run = int(following["run"]) if "run" in following else None
    return {"run": run, **counts, "differences": differences}
