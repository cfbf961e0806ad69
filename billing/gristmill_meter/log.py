"""The append-only log of one session, with group commit.

A write starts as soon as no other is in flight and takes everything that waits: no timer. Appending is
immediate and in order; what depends on a frame waits for `durable(number)`. Frames count from 1.
"""

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, LogLostError, VolumeFailedError
from gristmill_meter.disk import Appender, Disk
from gristmill_meter.frames import Body, Frame, Result, decode_frame
from gristmill_meter.segment import (
    HEADER_BYTES,
    Segment,
    crc32c,
    pack_frame,
    proven_durable,
    read_segment,
    segment_header,
)

logger = logging.getLogger(__name__)

FULL_RETRY_S: Final = 0.5
"""How long a write waits before it tries a full volume again. Old work is never dropped."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A frame that is not durable yet, and the blob that must be so before it."""

    number: int
    payload: bytes
    blob: tuple[str, bytes] | None


@dataclass(slots=True)
class SessionLog:
    """`folder` is relative to the disk's root. Build, then `recover` on a thread, then `append`."""

    disk: Disk
    folder: str
    epoch: int = 0
    appended_number: int = 0
    durable_number: int = 0
    failure: GristmillError | None = None
    full: bool = False
    bytes_written: int = 0
    on_durable: Callable[[], None] = lambda: None
    """Called after the durable number has grown, or the log has failed."""
    _segment: int = 0
    _end: int = 0
    _file: Appender | None = None
    _queue: list[Pending] = field(default_factory=list)
    _staged: dict[str, bytes] = field(default_factory=dict)
    _waiters: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    _flusher: asyncio.Task[None] | None = None
    _closing: bool = False

    # --- recovery (blocking; on a thread) --------------------------------------------------------

    def recover(self, epoch_if_new: int) -> list[Frame]:
        """Read the log, cut a torn tail, make the rest durable. Begins a new log where there is none.

        Raises LogLostError where frames are missing that had once been durable.
        """
        self.disk.make_dir(f"{self.folder}/blobs")
        payloads = self._read_segments(resume=True)
        self._read_or_begin_epoch(epoch_if_new, fresh=not payloads)
        self.appended_number = self.durable_number = len(payloads)
        if self._segment == 0:
            self._begin_segment([])
        return [_decode(self.folder, at + 1, payload) for at, payload in enumerate(payloads)]

    def read_frames(self) -> list[Frame]:
        """All frames that are durable now, read again (blocking; on a thread)."""
        payloads = self._read_segments(resume=False)[: self.durable_number]
        return [_decode(self.folder, at + 1, payload) for at, payload in enumerate(payloads)]

    def read_frame(self, number: int) -> Frame:
        """One durable frame, read again (blocking; on a thread)."""
        for _, path in reversed(self._segments()):
            segment = read_segment(self.disk.read(path))
            if segment is not None and segment.first <= number:
                return _decode(self.folder, number, segment.payloads[number - segment.first])
        raise _lost(self.folder, number, number)

    def _segments(self) -> list[tuple[int, str]]:
        names = [name for name in self.disk.list(self.folder) if name.startswith("log-")]
        return [(int(name[4:12]), f"{self.folder}/{name}") for name in names]

    def _read_segments(self, *, resume: bool) -> list[bytes]:
        """Payloads of all frames. A segment takes over from its first frame on: see `_write`."""
        payloads: list[bytes] = []
        newest: tuple[str, Segment, int] | None = None
        for number, path in self._segments():
            content = self.disk.read(path)
            segment = read_segment(content)
            if segment is None:
                # It was being begun; unless its frames say that more had been durable.
                self._check_damage(payloads, proven_durable(content, 0))
                continue
            if segment.first > len(payloads) + 1:
                raise _lost(self.folder, len(payloads) + 1, segment.first - 1)
            payloads = payloads[: segment.first - 1] + segment.payloads
            self._segment = number if resume else self._segment
            newest = (path, segment, len(content))
        if newest is not None and resume:
            self._check_damage(payloads, newest[1].damaged_after)
            self._resume_segment(newest[0], newest[1].end, newest[2])
        return payloads

    def _check_damage(self, payloads: list[bytes], proven: int) -> None:
        if proven > len(payloads):
            raise _lost(self.folder, len(payloads) + 1, proven)

    def _resume_segment(self, path: str, end: int, size: int) -> None:
        if end < size:
            logger.warning("log_tail_cut", extra={"path": path, "bytes": size - end})
            self.disk.truncate(path, end)
        self._file = self.disk.open_append(path)
        self._end = end
        self._file.fsync()
        self.disk.fsync_dir(self.folder)

    def _read_or_begin_epoch(self, epoch_if_new: int, *, fresh: bool) -> None:
        path = f"{self.folder}/epoch"
        if "epoch" in self.disk.list(self.folder):
            self.epoch = int(self.disk.read(path))
            return
        if not fresh:
            raise LogLostError(
                f"log {self.folder} has frames but no epoch file; restore the volume"
            )
        self._write_file(f"{path}.tmp", str(epoch_if_new).encode())
        self.disk.rename(f"{path}.tmp", path)
        self.disk.fsync_dir(self.folder)
        self.epoch = epoch_if_new

    # --- appending (on the event loop) -----------------------------------------------------------

    def append(self, payload: bytes, blob: tuple[str, bytes] | None = None) -> int:
        """Queue an encoded frame and give its number. Raises the log's failure, if it has failed."""
        if self.failure is not None:
            raise self.failure
        self.appended_number += 1
        self._queue.append(Pending(number=self.appended_number, payload=payload, blob=blob))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.get_running_loop().create_task(self._flush())
            self._flusher.add_done_callback(self._flushed)
        return self.appended_number

    async def durable(self, number: int) -> None:
        """Return once frame `number` is durable. Raises VolumeFailedError if it never will be."""
        if number <= self.durable_number:
            return
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((number, future))
        await future

    def make_body(self, name: str, content: bytes) -> tuple[Body, tuple[str, bytes] | None]:
        """A body for a frame, and the blob to append with that frame if it is large."""
        crc = crc32c(content)
        if len(content) <= limits.INLINE_PAYLOAD_BYTES_MAX:
            return Body(size=len(content), crc=crc, inline=content), None
        self._staged[name] = content
        return Body(size=len(content), crc=crc, blob=name), (name, content)

    async def read_body(self, body: Body) -> bytes:
        """The bytes of a body. Raises VolumeFailedError if the blob is gone or was changed."""
        if body.inline is not None:
            return body.inline
        content = self._staged.get(body.blob)
        if content is None:
            path = f"{self.folder}/blobs/{body.blob}"
            try:
                content = await asyncio.to_thread(self.disk.read, path)
            except OSError as error:
                raise VolumeFailedError(f"blob {path} cannot be read: {error}") from error
            if crc32c(content) != body.crc:
                raise VolumeFailedError(f"blob {path} does not have its recorded checksum")
        return content

    def blob_names(self) -> list[str]:
        """Blob files on the disk (blocking), without those that are still being written."""
        return [n for n in self.disk.list(f"{self.folder}/blobs") if n not in self._staged]

    async def read_result(self, body: Body, frame: int) -> bytes:
        """The bytes of a result whose inline copy may have been let go: RESULT is `frame`."""
        if body.inline is None and not body.blob:
            again = await asyncio.to_thread(self.read_frame, frame)
            if not isinstance(again, Result):
                raise VolumeFailedError(f"frame {frame} of log {self.folder} holds no result")
            body = again.result
        return await self.read_body(body)

    async def remove_blobs(self, names: Sequence[str]) -> None:
        await asyncio.to_thread(self._remove_blobs, names)

    async def close(self) -> None:
        """Wait for what was appended, unless the volume is full, then close the file."""
        self._closing = True
        if self._flusher is not None:
            await asyncio.wait([self._flusher])
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- writing ---------------------------------------------------------------------------------

    async def _flush(self) -> None:
        while self._queue and self.failure is None:
            batch, self._queue = self._queue, []
            try:
                await self._write_until_done(batch)
            except OSError as error:
                self._fail(VolumeFailedError(f"log {self.folder} cannot be written: {error}"))
                return
            self.durable_number = batch[-1].number
            for pending in batch:
                if pending.blob is not None:
                    self._staged.pop(pending.blob[0], None)
            self._wake()

    def _flushed(self, flusher: asyncio.Task[None]) -> None:
        """What waits must hear of a writer that died of anything else than the disk."""
        if self.failure is None and (flusher.cancelled() or flusher.exception() is not None):
            why = "cancelled" if flusher.cancelled() else repr(flusher.exception())
            self._fail(VolumeFailedError(f"the writer of log {self.folder} died: {why}"))

    async def _write_until_done(self, batch: list[Pending]) -> None:
        while True:
            try:
                await asyncio.to_thread(self._write, batch)
            except OSError as error:
                if not _is_full(error) or self._closing:
                    raise
                if not self.full:
                    logger.error("log_volume_full", extra={"folder": self.folder})  # noqa: TRY400 - expected
                self.full = True
                await asyncio.sleep(FULL_RETRY_S)
            else:
                self.full = False
                return

    def _write(self, batch: list[Pending]) -> None:
        """On a thread. After a failure the unsynced frames go, from memory, into a new segment.

        Raises OSError: with ENOSPC the log is as before, and the batch may be written again.
        """
        try:
            self._write_blobs(batch)
            if self._end >= limits.SEGMENT_BYTES_MAX or self._file is None:
                self._begin_segment(batch)
            else:
                self._end += self._write_frames(self._file, batch)
        except OSError as error:
            if _is_full(error):
                self._undo()
                raise
            logger.warning("log_write_failed", extra={"folder": self.folder, "error": str(error)})
            self._write_blobs(batch)
            self._begin_segment(batch)

    def _undo(self) -> None:
        """Cut half-written frames off, so that the next try begins where the last good one ended."""
        if self._file is not None:
            self.disk.truncate(self._segment_path(), self._end)

    def _segment_path(self) -> str:
        return f"{self.folder}/log-{self._segment:08d}.seg"

    def _write_blobs(self, batch: list[Pending]) -> None:
        blobs = [pending.blob for pending in batch if pending.blob is not None]
        for name, content in blobs:
            self._write_file(f"{self.folder}/blobs/{name}", content)
            self.bytes_written += len(content)
        if blobs:
            self.disk.fsync_dir(f"{self.folder}/blobs")

    def _write_file(self, path: str, content: bytes) -> None:
        self.disk.remove(path)  # A half-written one of an earlier try, or of a crash.
        file = self.disk.open_append(path)
        try:
            file.write(content)
            file.fsync()
        finally:
            file.close()

    def _write_frames(self, file: Appender, batch: list[Pending]) -> int:
        packed = b"".join(
            pack_frame(pending.number, self.durable_number, pending.payload) for pending in batch
        )
        if packed:
            file.write(packed)
        file.fsync()
        self.bytes_written += len(packed)
        return len(packed)

    def _begin_segment(self, batch: list[Pending]) -> None:
        """Write a new segment that begins behind the last durable frame."""
        old, self._file = self._file, None
        if old is not None:
            old.close()
        self._segment += 1
        path = self._segment_path()
        self.disk.remove(path)
        file = self.disk.open_append(path)
        try:
            file.write(segment_header(self.durable_number + 1))
            size = self._write_frames(file, batch)
            self.disk.fsync_dir(self.folder)
        except OSError as error:
            file.close()
            if _is_full(error):
                self.disk.remove(path)
                self._segment -= 1
            raise
        self._file, self._end = file, HEADER_BYTES + size

    def _remove_blobs(self, names: Sequence[str]) -> None:
        for name in names:
            self.disk.remove(f"{self.folder}/blobs/{name}")

    def _fail(self, failure: GristmillError) -> None:
        logger.error("volume_failed", extra={"folder": self.folder, "error": failure.message})
        self.failure = failure
        self._wake()

    def _wake(self) -> None:
        waiting = self._waiters
        self._waiters = [
            (number, future) for number, future in waiting if not self._settled(number)
        ]
        for number, future in waiting:
            if future.done() or not self._settled(number):
                continue
            if number <= self.durable_number:
                future.set_result(None)
            else:
                future.set_exception(self.failure or VolumeFailedError(f"log {self.folder} failed"))
        self.on_durable()

    def _settled(self, number: int) -> bool:
        return number <= self.durable_number or self.failure is not None


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _decode(folder: str, number: int, payload: bytes) -> Frame:
    try:
        return decode_frame(payload)
    except msgspec.MsgspecError as error:
        raise LogLostError(
            f"frame {number} of log {folder} is whole but unknown to this version: {error}"
        ) from error


def _lost(folder: str, first: int, last: int) -> LogLostError:
    return LogLostError(
        f"log {folder} lost frames {first} to {last}, which had been durable; restore the volume"
    )
