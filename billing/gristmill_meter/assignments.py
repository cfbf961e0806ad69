"""The folder of assignments: which sessions to serve. Read again and again; never written here."""

import logging
from pathlib import Path
from typing import Final

import msgspec

from gristmill_contracts.http import Assignment
from gristmill_contracts.ids import SessionUid

logger = logging.getLogger(__name__)

ASSIGNMENT_BYTES_MAX: Final = 64 * 2**10


class AssignmentsFolder:
    """Remembers what it has read, by modification time and size, so that a scan is cheap."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[tuple[int, int, int], Assignment | None]] = {}

    def scan(self) -> dict[SessionUid, Assignment]:
        """All readable assignments. A file that cannot be read is logged once and left out."""
        found: dict[SessionUid, Assignment] = {}
        known: dict[str, tuple[tuple[int, int, int], Assignment | None]] = {}
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else []:
            try:
                stat = path.stat()
                stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                before = self._known.get(path.name)
                if before is not None and before[0] == stamp:
                    assignment = before[1]
                else:
                    assignment = _read(path, stat.st_size)
            except FileNotFoundError:
                continue
            known[path.name] = (stamp, assignment)
            if assignment is not None:
                found[assignment.uid] = assignment
        self._known = known
        return found


def _read(path: Path, size: int) -> Assignment | None:
    if size > ASSIGNMENT_BYTES_MAX:
        logger.error("assignment_too_large", extra={"path": str(path), "bytes": size})
        return None
    try:
        assignment = msgspec.json.decode(path.read_bytes(), type=Assignment)
    except msgspec.MsgspecError as error:
        logger.error("assignment_unreadable", extra={"path": str(path), "error": str(error)})  # noqa: TRY400
        return None
    if path.name != f"{assignment.uid}.json" or not is_folder_name(assignment.uid):
        logger.error("assignment_misnamed", extra={"path": str(path), "uid": assignment.uid})
        return None
    return assignment


def is_folder_name(uid: str) -> bool:
    """The uid names a folder below the data folder; it must not lead out of it."""
    return bool(uid) and all(c.isalnum() or c in "-_" for c in uid)
