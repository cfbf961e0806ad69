"""Snapshots of a session: everything that a train operation may change, un-stepped gradients included."""

import logging
from pathlib import Path

import safetensors.torch
import torch

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


def take(disk: Disk, base: BaseModel, session: Session, keep: int) -> Snapshotted:
    """Write `snapshots/<applied>/`, then drop all but the newest `keep`. Raises UnavailableError."""
    root = snapshots_dir(session.state_dir)
    disk.make_dirs(root)
    buffers = {name: value.cpu() for name, value in session.buffers().items()}
    manifest = Manifest(
        kind="snapshot",
        base_model=base.facts.hugging_face_id,
        base_revision=base.facts.revision,
        rank=session.adapter.rank,
        alpha=session.adapter.alpha,
        seed=session.seed,
        counters=session.counters,
    )
    applied = session.counters.applied
    contents = {BUFFERS_FILE: safetensors.torch.save(buffers)}
    try:
        written, _ = write_folder(disk, root / str(applied), contents, manifest)
    except OSError as error:
        raise UnavailableError(
            f"session {session.uid}: its snapshot was not written: {error}; free space on the volume"
        ) from error
    for old in existing(disk, session.state_dir)[keep:]:
        disk.remove_tree(root / str(old))
    return Snapshotted(applied=applied, size_bytes=written.size_bytes)


def existing(disk: Disk, state_dir: str) -> list[int]:
    """Applied counts of the snapshots, newest first, damaged ones included."""
    names = disk.names(snapshots_dir(state_dir))
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
