"""`gristmill verify`: compute the hash chains of the ledger again, here, so that nobody has to trust it."""

import json
import os
import sys
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from gristmill_cli.chain_parts import verify_parts
from gristmill_cli.chain_source import LedgerChains, verify_file, verify_ledger
from gristmill_cli.cluster.ledger import LedgerAccess, ledger_access
from gristmill_cli.errors import CommandError
from gristmill_cli.local.instance import require_instance
from gristmill_cli.options import ClusterKeyFile, DataDir, LedgerUrl, find_layout
from gristmill_cli.output import print_table, reports_errors, say
from gristmill_contracts.chain.export import Auditor, Report
from gristmill_contracts.chain.files import read_heads, read_keys
from gristmill_contracts.chain.notes import VerifierKey

BROKEN: Final = 3
"""Exit code of a chain that is broken; 1 where it could not be verified."""


class VerifyOutput(StrEnum):
    """Formats of this command."""

    TABLE = "table"
    JSON = "json"


Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        min=1,
        show_default=False,
        help="Processes that verify beside each other. Default: one for each core.",
    ),
]


@reports_errors
def verify(
    *,
    data_dir: DataDir = None,
    ledger_url: LedgerUrl = "",
    cluster_key_file: ClusterKeyFile = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", "-t", help="Only of this tenant; may be repeated."),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="Verifier key of signed heads, or a file with one on each line; may be repeated. Not given: as the ledger says."
        ),
    ] = None,
    heads: Annotated[
        Path | None, typer.Option(help="Signed heads that were kept elsewhere: a file or a folder.")
    ] = None,
    from_checkpoint: Annotated[
        bool, typer.Option("--from-checkpoint", help="Only rows behind the newest signed head.")
    ] = False,
    offline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Verify an export, and ask no ledger.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the rows and heads as a file for --offline."),
    ] = None,
    jobs: Jobs = None,
    sign: Annotated[
        bool, typer.Option("--sign", help="Have the heads signed as they are now, first.")
    ] = False,
    show_key: Annotated[
        bool,
        typer.Option(
            "--show-key",
            help="Print the ledger's verifier keys, today's first, and verify nothing.",
        ),
    ] = False,
    output: Annotated[VerifyOutput, typer.Option("--output", "-o")] = VerifyOutput.TABLE,
) -> None:
    """Verify every row of usage and every signed head. Exit code 3 for a broken chain."""
    keys = [found for text in key or () for found in read_keys(text)]
    if offline is not None:
        if export or sign or show_key or from_checkpoint or tenant:
            raise CommandError(
                "--offline verifies a whole file; give it with --key and --heads alone"
            )
        report = verify_file(offline, _auditor(keys, heads))
    else:
        url = ledger_url or require_instance(find_layout(data_dir)).ledger_url
        access = ledger_access(url, cluster_key_file)
        chains = LedgerChains(access)
        if show_key:
            for found in chains.verifier_keys():
                typer.echo(str(found))
            return
        keys = keys or _told_keys(chains)
        report = _verify_online(
            access,
            _auditor(keys, heads),
            tenant or [],
            sign=sign,
            behind=from_checkpoint,
            file=export,
            jobs=jobs or os.cpu_count() or 1,
        )
    _show(report, output)
    if not report.ok:
        raise typer.Exit(BROKEN)


def _verify_online(
    access: LedgerAccess,
    auditor: Auditor,
    tenants: list[str],
    *,
    sign: bool,
    behind: bool,
    file: Path | None,
    jobs: int,
) -> Report:
    chains = LedgerChains(access)
    names = tenants or chains.start()[1]
    if sign:
        for name in names:
            chains.sign(name)
    starts = {}
    if behind:
        found = {name: chains.newest_head(name, auditor.keys) for name in names}
        starts = {name: head.seq for name, head in found.items() if head is not None}
    lengths = chains.lengths() if file is None else None
    if lengths is not None:
        return verify_parts(
            access, auditor, lengths=lengths, tenants=tenants, starts=starts, jobs=jobs
        )
    # In order, by one process: what is kept is a file in that order.
    with ExitStack() as stack:
        keep = None
        if file is not None:
            try:
                keep = stack.enter_context(file.open("wb"))
            except OSError as error:
                raise CommandError(f"the export cannot be written: {error}") from error
        return verify_ledger(chains, auditor, tenants=tenants, starts=starts, keep=keep)


def _told_keys(chains: LedgerChains) -> list[VerifierKey]:
    keys = chains.verifier_keys()
    if not keys:
        say(
            "note: this ledger signs no heads: whoever may write its database can rewrite it unseen"
        )
    for found in keys:
        say(
            f"note: heads are checked with the key that the ledger itself tells; keep it: --key {found}"
        )
    return keys


def _auditor(keys: list[VerifierKey], heads: Path | None) -> Auditor:
    kept = [] if heads is None else read_heads(heads, keys)
    return Auditor(keys=keys, heads=kept, progress=_progress)


def _progress(rows: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{rows:,} rows", nl=False, err=True)


def _show(report: Report, output: VerifyOutput) -> None:
    if sys.stderr.isatty():
        typer.echo("", err=True)
    if output is VerifyOutput.JSON:
        tenants = [each.as_json() for each in report.tenants]
        typer.echo(json.dumps({"ok": report.ok, "rows": report.rows, "tenants": tenants}, indent=2))
        return
    rows = [
        [
            each.walk.tenant,
            f"{each.walk.rows:,}",
            f"{each.first_seq}-{each.walk.seq}" if each.walk.rows else "-",
            f"{each.signed_seq or '-'}",
            f"{sum(each.walk.tokens):,}",
            "ok" if each.fault is None else "BROKEN",
        ]
        for each in report.tenants
    ]
    print_table(
        ["TENANT", "ROWS", "SEQ", "SIGNED TO", "TOKENS", "CHAIN"], rows, numbers=("ROWS", "TOKENS")
    )
    for fault in report.faults():
        say(
            f"broken: tenant {fault.tenant}, row {fault.seq}, event {fault.event_id or '-'}: {fault.what}"
        )
