"""Checkpoints on their way between the worker's folder and the ledger's store.

A finished save is uploaded before it is registered and its result released, the manifest last; what a
load or a sample needs is fetched before it is dispatched. Without a folder of our own nothing is copied:
all parts share one.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError, OperationFailedError
from gristmill_contracts.operations import (
    CheckpointRef,
    ComputeLogprobs,
    LoadState,
    LoadWeightsForSampling,
    Operation,
    Sample,
    SaveResult,
)
from gristmill_meter.ports import Ledger, LedgerAwayError, Owner
from gristmill_meter.pulse import backoff
from gristmill_meter.session import Session, SessionOverError
from gristmill_meter.shared_folder import MANIFEST, SharedFolder, is_path

logger = logging.getLogger(__name__)

FETCHING_KINDS: Final = frozenset(
    {"load_state", "sample", "compute_logprobs", "load_weights_for_sampling"}
)
NOT_FETCHED: Final = "merged/"
"""Below a checkpoint: the whole model again, for others than the worker."""

_operations: Final = msgspec.msgpack.Decoder(Operation)


@dataclass(slots=True, kw_only=True)
class Artifacts:
    """Of one session. `shared` is None where nothing is copied."""

    session: Session
    ledger: Ledger
    shared: SharedFolder | None
    _fetching: dict[str, asyncio.Lock] = field(default_factory=dict)

    # --- out -------------------------------------------------------------------------------------

    async def upload(self, saved: SaveResult) -> None:
        """Have the ledger keep a finished checkpoint. Again is no harm: what it has is not sent.

        Raises LedgerAwayError, FencedError, OperationFailedError for files that are not what their
        manifest says, ConflictError where the ledger keeps another checkpoint of that id.
        """
        if self.shared is None:
            return
        parts = self._own_parts(saved.path)
        if parts is None:
            raise OperationFailedError(
                f"checkpoint path {saved.path!r} is not below the folder of tenant "
                f"{self.session.assignment.tenant}"
            )
        manifest = await asyncio.to_thread(self.shared.manifest, parts, saved.manifest_sha256)
        for path in sorted(manifest.files):
            await self._send(parts, path, manifest.files[path].sha256)
        await self._send(parts, MANIFEST, saved.manifest_sha256)
        logger.info(
            "checkpoint_uploaded",
            extra={"session": self.session.state.uid, "checkpoint": saved.checkpoint_id},
        )

    async def _send(self, parts: Sequence[str], path: str, sha256: str) -> None:
        assert self.shared is not None
        key = "/".join([*parts[1:], path])
        if await self.ledger.artifact_sha256(self._owner, key) == sha256:
            return
        try:
            file = await asyncio.to_thread(self.shared.read, [*parts, *path.split("/")])
        except OSError as error:
            raise OperationFailedError(
                f"checkpoint file {path} cannot be read: {error.strerror or error}; save it again"
            ) from error
        try:
            await self.ledger.put_artifact(self._owner, key, file, sha256)
        except InvalidRequestError as error:
            raise OperationFailedError(f"checkpoint file {path}: {error.message}") from error
        finally:
            file.close()

    # --- in --------------------------------------------------------------------------------------

    async def prepare(self, kind: str, content: bytes) -> None:
        """Have the checkpoint of an encoded operation in the worker's folder, if the ledger keeps it.

        Waits for a ledger that is away. Raises SessionOverError once the session can run nothing any
        more, OperationFailedError for files that are not what the ledger said.
        """
        if self.shared is None or kind not in FETCHING_KINDS:
            return
        ref = checkpoint_of(_operations.decode(content))
        parts = None if ref is None else self._own_parts(ref.path)
        if parts is None:
            return
        attempt, settings = 0, self.session.settings
        while True:
            try:
                await self.fetch(parts)
            except LedgerAwayError as error:
                if self.session.over:
                    raise SessionOverError(error.message) from error
                await backoff(attempt, settings.retry_first_s, settings.retry_last_s)
                attempt += 1
            else:
                return

    async def fetch(self, parts: Sequence[str]) -> None:
        """Copy a checkpoint here, unless it is here or the ledger has none: the worker says so then."""
        assert self.shared is not None
        key = "/".join(parts)
        async with self._fetching.setdefault(key, asyncio.Lock()):
            if await asyncio.to_thread(self.shared.holds, parts):
                return
            prefix = "/".join(parts[1:]) + "/"
            listed = await self.ledger.list_artifacts(self._owner, prefix)
            files = {info.path.removeprefix(prefix): info.sha256 for info in listed}
            if MANIFEST not in files:
                return
            try:
                await asyncio.to_thread(self.shared.begin, parts)
                for path, sha256 in files.items():
                    if is_path(path) and not path.startswith(NOT_FETCHED):
                        await self._receive(parts, prefix, path, sha256)
                await asyncio.to_thread(self.shared.finish, parts)
            except OSError as error:
                raise OperationFailedError(
                    f"checkpoint {key} cannot be fetched: {error.strerror or error}; free space"
                ) from error
            finally:
                await asyncio.to_thread(self.shared.abandon, parts)
        self._fetching.pop(key, None)
        logger.info("checkpoint_fetched", extra={"session": self.session.state.uid, "path": key})

    async def _receive(self, parts: Sequence[str], prefix: str, path: str, sha256: str) -> None:
        assert self.shared is not None
        found = hashlib.sha256()
        file = await asyncio.to_thread(self.shared.write, parts, path)
        try:
            async for chunk in self.ledger.read_artifact(self._owner, prefix + path):
                found.update(chunk)
                await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(_sync, file)
        finally:
            file.close()
        if found.hexdigest() != sha256:
            raise LedgerAwayError(f"checkpoint file {path} arrived changed; it is fetched again")

    # --- both ------------------------------------------------------------------------------------

    def _own_parts(self, path: str) -> list[str] | None:
        """The parts of a path below the tenant's own folder; None for any other."""
        parts = path.split("/")
        own = len(parts) > 1 and parts[0] == self.session.assignment.tenant
        fits = len(path.encode()) <= limits.OBJECT_KEY_BYTES_MAX
        return parts if own and fits and is_path(path) else None

    @property
    def _owner(self) -> Owner:
        a = self.session.assignment
        return Owner(tenant=a.tenant, session=a.uid, attempt=a.attempt)


def checkpoint_of(operation: Operation) -> CheckpointRef | None:
    """The checkpoint that an operation reads, if it reads one."""
    if isinstance(operation, LoadState):
        return operation.checkpoint
    if isinstance(operation, Sample | ComputeLogprobs | LoadWeightsForSampling):
        return operation.adapter
    return None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
