"""Checkpoints in the artifact folder: adapters to sample from, states to train on from."""

from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import msgspec
import safetensors.torch
import torch

from gristmill_contracts.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OperationFailedError,
)
from gristmill_contracts.ids import checkpoint_id, parse_op_id
from gristmill_contracts.operations import (
    CheckpointRef,
    LoadState,
    LoadStateResult,
    SaveResult,
    SaveState,
    SaveWeights,
)
from gristmill_worker import peft_files
from gristmill_worker.adapter import Adapter, make_adapter
from gristmill_worker.base_model import BaseModel
from gristmill_worker.disk import Disk
from gristmill_worker.folders import DamagedFolderError, Manifest, read_manifest, write_folder
from gristmill_worker.merge import write_merged
from gristmill_worker.session import Counters, Session

STATE_FILE: Final = "training_state.safetensors"
MERGED_DIR: Final = "merged"


class Checkpoints:
    """All paths are relative to `root`, and stay inside it. Keeps the newest used adapters."""

    def __init__(self, disk: Disk, base: BaseModel, root: Path, cached_max: int) -> None:
        self.disk = disk
        self.base = base
        self.root = root
        self.cached_max = cached_max
        self.cached: OrderedDict[str, Adapter] = OrderedDict()

    def folder(self, relative: str) -> Path:
        """Raises InvalidRequestError for a path that leaves the artifact folder."""
        root = self.root.resolve()
        folder = (root / relative).resolve()
        if not folder.is_relative_to(root) or folder == root:
            raise InvalidRequestError(f"checkpoint path {relative!r} leaves the artifact folder")
        return folder

    def save(self, session: Session, op: SaveWeights | SaveState, op_id: str) -> SaveResult:
        """Write the checkpoint of this operation; again, it is found as it is."""
        try:
            identity = checkpoint_id(parse_op_id(op_id))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        folder = self.folder(f"{op.location}/{identity}")
        contents = peft_files.adapter_files(self.base, session.adapter)
        extra = None
        if isinstance(op, SaveState):
            buffers = {name: value.cpu() for name, value in session.buffers().items()}
            del buffers["weights"]  # the adapter's own file has them
            contents[STATE_FILE] = safetensors.torch.save(buffers)
        elif op.merge:
            extra = _merged_writer(self.base, session.adapter)
        manifest = self._manifest(session, "state" if isinstance(op, SaveState) else "weights")
        self.disk.make_dirs(folder.parent)
        try:
            written, digest = write_folder(self.disk, folder, contents, manifest, extra)
        except OSError as error:
            raise OperationFailedError(
                f"checkpoint {identity} was not written: {error.strerror or error}; free space and save again"
            ) from error
        return SaveResult(
            checkpoint_id=identity,
            kind="state" if isinstance(op, SaveState) else "weights",
            path=str(folder.relative_to(self.root.resolve())),
            rank=session.adapter.rank,
            alpha=session.adapter.alpha,
            size_bytes=written.size_bytes,
            manifest_sha256=digest,
        )

    def _manifest(self, session: Session, kind: Any) -> Manifest:  # Any: a literal of Manifest
        return Manifest(
            kind=kind,
            base_model=self.base.facts.hugging_face_id,
            base_revision=self.base.facts.revision,
            rank=session.adapter.rank,
            alpha=session.adapter.alpha,
            seed=session.seed,
            counters=msgspec.structs.replace(session.counters, applied=0),
        )

    def adapter(self, ref: CheckpointRef) -> Adapter:
        """The adapter of a checkpoint, from memory if it was used lately."""
        if ref.id in self.cached:
            self.cached.move_to_end(ref.id)
            return self.cached[ref.id]
        adapter = self._read(ref, self._checked(ref))
        self.cached[ref.id] = adapter
        while len(self.cached) > self.cached_max:
            self.cached.popitem(last=False)
        return adapter

    def _checked(self, ref: CheckpointRef) -> Manifest:
        folder = self.folder(ref.path)
        if not self.disk.exists(folder):
            raise NotFoundError(f"checkpoint {ref.name} is gone; save it again")
        try:
            manifest = read_manifest(self.disk, folder, leave_out=MERGED_DIR + "/")
        except DamagedFolderError as error:
            raise OperationFailedError(f"checkpoint {ref.name} is damaged: {error}") from error
        missing = {peft_files.CONFIG_FILE, peft_files.WEIGHTS_FILE} - set(manifest.files)
        if missing:
            raise OperationFailedError(
                f"checkpoint {ref.name} is damaged: its manifest does not name {min(missing)}"
            )
        if manifest.base_revision != self.base.facts.revision:
            raise InvalidRequestError(
                f"checkpoint {ref.name} belongs to base model {manifest.base_model} "
                f"({manifest.base_revision[:16]}), but this session runs "
                f"{self.base.facts.hugging_face_id} ({self.base.facts.revision[:16]})"
            )
        return manifest

    def _read(self, ref: CheckpointRef, manifest: Manifest, seed: int = 0) -> Adapter:
        folder = self.folder(ref.path)
        layout, alpha, weights = peft_files.parse_adapter(
            self.base,
            self.disk.read(folder / peft_files.CONFIG_FILE),
            self.disk.read(folder / peft_files.WEIGHTS_FILE),
            ref.name,
            seed,
        )
        if (layout.rank, alpha) != (manifest.rank, manifest.alpha):
            raise ConflictError(f"checkpoint {ref.name}: config and manifest disagree on the rank")
        return make_adapter(layout, alpha, weights, device=self.base.device, dtype=self.base.dtype)

    def load_state(self, session: Session, op: LoadState) -> LoadStateResult:
        """Replace the session's adapter. A session that trained nothing takes on rank and alpha.

        with_optimizer: moments, step count and un-stepped gradients as well; else all start anew.
        """
        ref = op.checkpoint
        manifest = self._checked(ref)
        own = (session.adapter.rank, session.adapter.alpha)
        if session.counters.trained and own != (manifest.rank, manifest.alpha):
            raise InvalidRequestError(
                f"checkpoint {ref.name} has rank {manifest.rank} and alpha {manifest.alpha}, but "
                f"the session trains rank {own[0]} and alpha {own[1]}; load it into a new session"
            )
        if op.with_optimizer and STATE_FILE not in manifest.files:
            raise InvalidRequestError(
                f"checkpoint {ref.name} holds weights alone; load it without the optimizer"
            )
        adapter = self._read(ref, manifest, session.seed)
        m, v, gradient = (torch.zeros_like(adapter.weights) for _ in range(3))
        counters = Counters(applied=session.counters.applied, trained=session.counters.trained)
        if op.with_optimizer:
            saved = safetensors.torch.load(self.disk.read(self.folder(ref.path) / STATE_FILE))
            for target, name in ((m, "m"), (v, "v"), (gradient, "gradient")):
                target.copy_(saved[name])
            counters.step = manifest.counters.step
            counters.accumulated = manifest.counters.accumulated
            counters.tokens = manifest.counters.tokens
        session.adapter, session.m, session.v, session.gradient = adapter, m, v, gradient
        session.counters = counters
        return LoadStateResult(rank=adapter.rank, alpha=adapter.alpha)


def _merged_writer(base: BaseModel, adapter: Adapter) -> Any:  # Any: a closure over both
    return lambda folder: write_merged(base, adapter, folder / MERGED_DIR)
