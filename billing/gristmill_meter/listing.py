"""`python -m gristmill_meter drain --list`: which logs lie in a data folder. Reads alone; nothing is cut or sent."""

from dataclasses import dataclass
from typing import Final

from gristmill_contracts.errors import GristmillError
from gristmill_contracts.ids import SessionUid
from gristmill_meter.assignments import is_folder_name
from gristmill_meter.disk import Disk
from gristmill_meter.log import SessionLog
from gristmill_meter.log_files import decode, read_log
from gristmill_meter.rebuild import rebuild
from gristmill_meter.records import SessionState

HEADINGS: Final = ("SESSION", "TENANT", "ATTEMPT", "USAGE", "WAITING", "STATE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLog:
    """`usage`: events that the log has told, ever; the ledger knows how many of them it has."""

    session: str
    tenant: str = ""
    attempt: int = 0
    usage: int = 0
    waiting: int = 0
    state: str = ""

    def row(self) -> tuple[str, ...]:
        numbers = (str(self.attempt), str(self.usage), str(self.waiting))
        return (self.session, self.tenant or "-", *numbers, self.state)


def list_logs(disk: Disk) -> list[ListedLog]:
    """All session logs of a data folder, by session."""
    names = [name for name in disk.list("") if is_folder_name(name)]
    return [_listed(disk, name) for name in names if "epoch" in disk.list(name)]


def _listed(disk: Disk, name: str) -> ListedLog:
    state = SessionState(uid=SessionUid(name))
    try:
        content = read_log(disk, name)
        log = SessionLog(disk=disk, folder=name, first_number=content.first)
        numbered = enumerate(content.payloads, content.first)
        rebuild(state, log, [decode(name, number, payload) for number, payload in numbered])
    except (GristmillError, OSError) as error:
        return ListedLog(session=name, state=f"unreadable: {error}")
    told = "failed" if state.failure is not None else "open"
    return ListedLog(
        session=name,
        tenant=state.tenant,
        attempt=state.attempt,
        usage=state.head_seq,
        waiting=len(state.open_keys),
        state="closed" if state.closed else told,
    )


def table(logs: list[ListedLog]) -> str:
    """For people: columns as wide as they need."""
    rows = [HEADINGS, *(log.row() for log in logs)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADINGS))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
