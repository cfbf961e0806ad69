"""Folders that exist whole or not at all: written aside, synced, renamed, and checked when read."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from gristmill_worker.disk import Disk
from gristmill_worker.session import Counters

MANIFEST_FILE: Final = "manifest.json"
ASIDE: Final = ".writing-"
FORMAT: Final = 1


class DamagedFolderError(Exception):
    """A folder without a manifest, or with a file that is not what its manifest says."""


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last. `base_revision` names the model that the numbers belong to."""

    format: int = FORMAT
    kind: Literal["weights", "state", "snapshot"]
    base_model: str
    base_revision: str
    rank: int
    alpha: int
    seed: int
    counters: Counters
    files: dict[str, FileFacts] = {}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def write_folder(
    disk: Disk,
    folder: Path,
    contents: Mapping[str, bytes],
    manifest: Manifest,
    extra: Callable[[Path], None] | None = None,
) -> tuple[Manifest, str]:
    """Make `folder` durable. `extra` may write more files below the folder it is given.

    Returns the manifest with its files, and its SHA-256. An existing folder with the same manifest
    stays; another one is replaced. Raises OSError, and leaves nothing behind.
    """
    aside = folder.with_name(ASIDE + folder.name)
    disk.remove_tree(aside)
    disk.make_dirs(aside)
    try:
        return _write_aside(disk, aside, folder, contents, manifest, extra)
    except Exception:
        disk.remove_tree(aside)  # a full disk needs the room
        raise


def _write_aside(  # noqa: PLR0917
    disk: Disk,
    aside: Path,
    folder: Path,
    contents: Mapping[str, bytes],
    manifest: Manifest,
    extra: Callable[[Path], None] | None,
) -> tuple[Manifest, str]:
    for name, data in contents.items():
        disk.write(aside / name, data)
    if extra is not None:
        extra(aside)
    facts: dict[str, FileFacts] = {}
    for name in disk.files(aside):
        data = disk.read(aside / name)
        facts[name] = FileFacts(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        disk.sync_file(aside / name)
    written = msgspec.structs.replace(manifest, files=facts)
    encoded = msgspec.json.format(msgspec.json.encode(written, order="sorted"), indent=1)
    disk.write(aside / MANIFEST_FILE, encoded)
    disk.sync_file(aside / MANIFEST_FILE)
    for below in sorted({(aside / name).parent for name in facts} | {aside}):
        disk.sync_dir(below)
    _put_in_place(disk, aside, folder, encoded)
    return written, hashlib.sha256(encoded).hexdigest()


def _put_in_place(disk: Disk, aside: Path, folder: Path, manifest: bytes) -> None:
    if disk.exists(folder):
        same = disk.exists(folder / MANIFEST_FILE) and disk.read(folder / MANIFEST_FILE) == manifest
        if same and not damage(disk, folder):
            disk.remove_tree(aside)
            return
        disk.remove_tree(folder)
    disk.rename(aside, folder)
    disk.sync_dir(folder.parent)


def damage(disk: Disk, folder: Path) -> str:
    """What is wrong with a folder; "" if nothing is."""
    try:
        read_manifest(disk, folder)
    except DamagedFolderError as error:
        return str(error)
    return ""


def read_manifest(disk: Disk, folder: Path, *, leave_out: str = "") -> Manifest:
    """Read every file and compare it, but those below `leave_out`. Raises DamagedFolderError."""
    try:
        manifest = msgspec.json.decode(disk.read(folder / MANIFEST_FILE), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        # Clients are told: our own paths are none of their business.
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedFolderError(f"{folder.name}: no readable {MANIFEST_FILE}: {reason}") from error
    for name, facts in manifest.files.items():
        if leave_out and name.startswith(leave_out):
            continue
        try:
            data = disk.read(folder / name)
        except OSError as error:
            raise DamagedFolderError(f"{folder.name}: {name} is missing") from error
        if hashlib.sha256(data).hexdigest() != facts.sha256:
            raise DamagedFolderError(f"{folder.name}: {name} is not what its manifest says")
    return manifest
