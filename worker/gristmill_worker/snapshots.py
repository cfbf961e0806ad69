"""Snapshots of a session: everything that a train operation may change, un-stepped gradients included.

Taken in two steps: `copy` on the engine's thread, between two operations, and `write` on another one,
while the engine goes on. A snapshot exists once `write` has returned.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from gristmill_contracts.errors import ConflictError, UnavailableError
from gristmill_contracts.http import Snapshotted
from gristmill_worker.adapter import make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.disk import Disk
from gristmill_worker.folders import (
    ASIDE,
    DamagedFolderError,
    Manifest,
    read_manifest,
    write_folder,
)
from gristmill_worker.session import Session

log = logging.getLogger(__name__)

BUFFERS_FILE = "buffers.safetensors"


def snapshots_dir(state_dir: str) -> Path:
    return Path(state_dir) / "snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A session's state at one moment, on the host; nobody changes it any more."""

    uid: str
    root: Path
    manifest: Manifest
    buffers: dict[str, Tensor]


def copy(base: BaseModel, session: Session) -> Copied:
    """What the engine's thread does of a snapshot: memory to memory, no disk."""
    manifest = Manifest(
        kind="snapshot",
        base_model=base.facts.hugging_face_id,
        base_revision=base.facts.revision,
        rank=session.adapter.rank,
        alpha=session.adapter.alpha,
        seed=session.seed,
        counters=msgspec.structs.replace(session.counters),
    )
    return Copied(
        uid=session.uid,
        root=snapshots_dir(session.state_dir),
        manifest=manifest,
        buffers={
            name: value.detach().to("cpu", copy=True) for name, value in session.buffers().items()
        },
    )


def write(disk: Disk, copied: Copied, keep: int) -> Snapshotted:
    """Make `snapshots/<applied>/` durable, then drop all but the newest `keep`.

    Raises UnavailableError, and then the older ones are as they were.
    """
    root, applied = copied.root, copied.manifest.counters.applied
    contents = {BUFFERS_FILE: safetensors.torch.save(copied.buffers)}
    try:
        disk.make_dirs(root)
        written, _ = write_folder(disk, root / str(applied), contents, copied.manifest)
    except OSError as error:
        raise UnavailableError(
            f"session {copied.uid}: its snapshot was not written: {error}; free space on the volume"
        ) from error
    for old in _in(disk, root)[keep:]:
        try:
            disk.remove_tree(root / str(old))
        except OSError as error:  # the new one is durable all the same
            log.warning("old_snapshot_kept", extra={"applied": old, "error": str(error)})
    return Snapshotted(applied=applied, size_bytes=written.size_bytes)


def existing(disk: Disk, state_dir: str) -> list[int]:
    """Applied counts of the snapshots, newest first, damaged ones included."""
    return _in(disk, snapshots_dir(state_dir))


def _in(disk: Disk, root: Path) -> list[int]:
    names = disk.names(root)
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def restore(disk: Disk, base: BaseModel, uid: str, state_dir: str) -> Session | None:
    """The newest whole snapshot; None if there is none.

    Raises ConflictError if it belongs to another base model.
    """
    root = snapshots_dir(state_dir)
    for applied in existing(disk, state_dir):
        try:
            return _load(disk, base, uid, state_dir, root / str(applied))
        except DamagedFolderError as error:
            log.warning("snapshot_damaged", extra={"applied": applied, "error": str(error)})
    return None


def drop_useless(disk: Disk, state_dir: str, applied_max: int | None) -> None:
    """Remove what a killed process left half written, and what the caller's log does not hold.

    The log goes on from `applied_max` with other operations: a later snapshot is of another history.
    """
    root = snapshots_dir(state_dir)
    for name in disk.names(root):
        ahead = name.isdecimal() and applied_max is not None and int(name) > applied_max
        if ahead or name.startswith(ASIDE):
            disk.remove_tree(root / name)


def _load(disk: Disk, base: BaseModel, uid: str, state_dir: str, folder: Path) -> Session:
    manifest = read_manifest(disk, folder)
    if manifest.base_revision != base.facts.revision:
        raise ConflictError(
            f"session {uid}: its snapshot belongs to base model {manifest.base_revision}, but this "
            f"worker holds {base.facts.revision}; start a worker with the session's own model"
        )
    buffers = safetensors.torch.load(disk.read(folder / BUFFERS_FILE))
    adapter = make_adapter(
        base.layout(manifest.rank), manifest.alpha, buffers["weights"],
        device=base.device, dtype=base.dtype,
    )  # fmt: skip
    m, v, gradient = (
        buffers[name].to(base.device, torch.float32) for name in ("m", "v", "gradient")
    )
    return Session(
        uid=uid, state_dir=state_dir, seed=manifest.seed, adapter=adapter, m=m, v=v,
        gradient=gradient, counters=manifest.counters,
    )  # fmt: skip
