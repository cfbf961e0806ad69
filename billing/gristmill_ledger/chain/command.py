"""`python -m gristmill_ledger verify`: verify the ledger's own database, or a file that was exported."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from gristmill_contracts.chain.export import Auditor, Report, read_items
from gristmill_contracts.chain.files import read_heads, read_keys
from gristmill_contracts.chain.notes import SignedHead, VerifierKey
from gristmill_contracts.errors import GristmillError
from gristmill_ledger.chain.keys import existing_key, told_keys
from gristmill_ledger.chain.verify import verify_database
from gristmill_ledger.settings import LedgerSettings

OK, BROKEN, FAILED = 0, 1, 2


def main(arguments: list[str]) -> int:
    """Exit status: 0 when all is as it must be, 1 for a broken chain, 2 when it could not be verified."""
    options = parser().parse_args(arguments)
    started = time.monotonic()
    try:
        report = verify(options)
    except (GristmillError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    show(report, time.monotonic() - started, as_json=options.output == "json")
    return OK if report.ok else BROKEN


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m gristmill_ledger verify",
        description="Compute the hash chain of every tenant again and name the first row that is wrong. "
        "Reads the database of GRISTMILL_LEDGER_DATABASE_URL or GRISTMILL_LEDGER_DATA_DIR.",
    )
    made.add_argument(
        "--tenant", "-t", action="append", default=[], help="only this one (repeatable)"
    )
    made.add_argument(
        "--from-checkpoint", action="store_true", help="only rows behind the newest signed head"
    )
    made.add_argument(
        "--offline", type=Path, metavar="FILE", help="an export instead of the database"
    )
    made.add_argument(
        "--key", action="append", default=[], help="verifier key, or a file of them (repeatable)"
    )
    made.add_argument(
        "--heads", type=Path, help="signed heads that were kept elsewhere: a file or a folder"
    )
    made.add_argument(
        "--jobs",
        "-j",
        type=int,
        default=os.cpu_count() or 1,
        help="processes (default: %(default)s)",
    )
    made.add_argument("--output", "-o", choices=("table", "json"), default="table")
    return made


def verify(options: argparse.Namespace) -> Report:
    keys = [found for text in options.key for found in read_keys(text)]
    if options.offline is not None:
        return _verify_file(options.offline, keys, options.heads)
    settings = LedgerSettings()
    keys = keys or told_keys(existing_key(settings), settings.chain_old_keys)
    return verify_database(
        settings.url,
        keys=keys,
        tenants=options.tenant,
        jobs=max(1, options.jobs),
        from_checkpoint=options.from_checkpoint,
        kept=_kept(options.heads, keys),
        progress=_progress,
    )


def _verify_file(path: Path, keys: list[VerifierKey], heads: Path | None) -> Report:
    auditor = Auditor(keys=keys, heads=_kept(heads, keys))
    with path.open("rb") as file:
        auditor.feed(read_items(file))
    return auditor.finish()


def _kept(path: Path | None, keys: list[VerifierKey]) -> list[SignedHead]:
    return [] if path is None else read_heads(path, keys)


def _progress(done: int, rows: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done >= rows else ""
        print(f"\r{done:,} of {rows:,} rows", end=end, file=sys.stderr, flush=True)


def show(report: Report, seconds: float, *, as_json: bool) -> None:
    if as_json:
        tenants = [each.as_json() for each in report.tenants]
        print(
            json.dumps(
                {"ok": report.ok, "rows": report.rows, "seconds": seconds, "tenants": tenants}
            )
        )
        return
    for each in report.tenants:
        walk = each.walk
        print(f"{walk.tenant}: rows {each.first_seq} to {walk.seq}, signed to {each.signed_seq}, "
              f"{'ok' if each.fault is None else 'BROKEN'}")  # fmt: skip
    for fault in report.faults():
        print(f"BROKEN {fault.tenant} row {fault.seq} {fault.event_id}: {fault.what}")
    speed = report.rows / seconds if seconds else 0.0
    print(f"{report.rows:,} rows in {seconds:.2f} s, {speed:,.0f} rows/s")
