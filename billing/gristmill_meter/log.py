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

from gristmill_contracts import limits
from gristmill_contracts.errors import GristmillError, VolumeFailedError
from gristmill_meter.disk import Appender, Cell, Disk
from gristmill_meter.frames import Body, Frame, Result
from gristmill_meter.log_files import (
    TOLD_FILE,
    LogContent,
    Start,
    bytes_since_start,
    decode,
    epoch_of,
    pack_told,
    read_frame,
    read_log,
    segment_numbers,
    segment_path,
    told_of,
    write_file,
)
from gristmill_meter.segment import HEADER_BYTES, crc32c, pack_frame, segment_header

logger = logging.getLogger(__name__)

FULL_RETRY_S: Final = 0.5
"""How long a write waits before it tries a full volume again. Old work is never dropped."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A frame that is not durable yet, and the blob that must be so before it."""

    number: int
    payload: bytes
    blob: tuple[str, bytes] | None
    start: Start | None = None

    @property
    def size(self) -> int:
        return len(self.payload) + (0 if self.blob is None else len(self.blob[1]))


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
    unwritten_bytes: int = 0
    """Of frames and bodies that were appended and are not durable yet."""
    first_number: int = 1
    """Of the oldest frame that is kept."""
    on_durable: Callable[[], None] = lambda: None
    """Called after the durable number has grown, or the log has failed."""
    _segment: int = 0
    _starts: dict[int, Start] = field(default_factory=dict)
    """Segments that begin with a CHECKPOINT."""
    _bytes_since_start: int = 0
    _cell: Cell | None = None
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

        The first frame has number `first_number`; it is a CHECKPOINT unless that is 1. Raises
        LogLostError where frames are missing that had once been durable.
        """
        self.disk.make_dir(f"{self.folder}/blobs")
        content = read_log(self.disk, self.folder, told=told_of(self.disk, self.folder))
        self.epoch = epoch_of(self.disk, self.folder, epoch_if_new, fresh=not content.payloads)
        self._segment, self.first_number = content.segment, content.first
        self._starts = content.starts
        self.appended_number = self.durable_number = content.last
        self._cell = self.disk.open_cell(f"{self.folder}/{TOLD_FILE}")
        if content.segment:
            self._resume_segment(content)
        else:
            self._begin_segment([])
        frames = self._decoded(content)
        self._bytes_since_start = bytes_since_start(frames, content.payloads)
        return frames

    def read_frames(self) -> list[Frame]:
        """All frames that are durable now, read again (blocking; on a thread)."""
        content = read_log(self.disk, self.folder)
        return self._decoded(content)[: self.durable_number - content.first + 1]

    def _decoded(self, content: LogContent) -> list[Frame]:
        payloads = enumerate(content.payloads)
        return [decode(self.folder, content.first + at, payload) for at, payload in payloads]

    def _resume_segment(self, content: LogContent) -> None:
        path = segment_path(self.folder, content.segment)
        if content.end < content.size:
            cut = content.size - content.end
            logger.warning("log_tail_cut", extra={"path": path, "bytes": cut})
            self.disk.truncate(path, content.end)
        self._file = self.disk.open_append(path)
        self._end = content.end
        self._file.fsync()
        self.disk.fsync_dir(self.folder)

    # --- appending (on the event loop) -----------------------------------------------------------

    def append(
        self,
        payload: bytes,
        blob: tuple[str, bytes] | None = None,
        *,
        start: Start | None = None,
    ) -> int:
        """Queue an encoded frame and give its number. Raises the log's failure, if it has failed.

        start: the frame is a CHECKPOINT, and a new segment begins with it.
        """
        if self.failure is not None:
            raise self.failure
        self.appended_number += 1
        self._bytes_since_start = 0 if start else self._bytes_since_start + len(payload)
        pending = Pending(number=self.appended_number, payload=payload, blob=blob, start=start)
        self._queue.append(pending)
        self.unwritten_bytes += pending.size
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
        staged = self._staged.get(body.blob)
        return await asyncio.to_thread(self.read_body_now, body) if staged is None else staged

    def read_body_now(self, body: Body) -> bytes:
        """As `read_body` (blocking), for a body that is durable."""
        if body.inline is not None:
            return body.inline
        path = f"{self.folder}/blobs/{body.blob}"
        try:
            content = self.disk.read(path)
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
            again = await asyncio.to_thread(read_frame, self.disk, self.folder, frame)
            if not isinstance(again, Result):
                raise VolumeFailedError(f"frame {frame} of log {self.folder} holds no result")
            body = again.result
        return await self.read_body(body)

    async def remove_blobs(self, names: Sequence[str]) -> None:
        await asyncio.to_thread(self._remove_blobs, names)

    # --- retention -------------------------------------------------------------------------------

    @property
    def start_due(self) -> bool:
        """The newest segment is long enough: a CHECKPOINT should begin another."""
        return self._bytes_since_start >= limits.SEGMENT_BYTES

    async def trim(self, needed_from: int) -> bool:
        """Remove the segments that lie wholly below a CHECKPOINT at or below frame `needed_from`.

        True if any was removed.
        """
        number = max((n for n, s in self._starts.items() if s.frame <= needed_from), default=0)
        start = self._starts.get(number)
        if start is None or start.frame <= self.first_number:
            return False
        if start.frame > self.durable_number:
            return False
        await asyncio.to_thread(self._remove_segments_before, number)
        self.first_number = start.frame
        for gone in [n for n in self._starts if n < number]:
            del self._starts[gone]
        return True

    def _remove_segments_before(self, number: int) -> None:
        """Oldest first, each durably: what a crash leaves is a log without a hole."""
        for old in segment_numbers(self.disk, self.folder):
            if old < number:
                self.disk.remove(segment_path(self.folder, old))
                self.disk.fsync_dir(self.folder)

    @property
    def first_seq(self) -> int:
        """The oldest usage that the log can tell again."""
        return min((start.first_seq for start in self._starts.values()
                    if start.frame == self.first_number), default=1)  # fmt: skip

    async def close(self) -> None:
        """Wait for what was appended, unless the volume is full, then close the file."""
        self._closing = True
        if self._flusher is not None:
            await asyncio.wait([self._flusher])
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._cell is not None:
            self._cell.close()
            self._cell = None

    # --- writing ---------------------------------------------------------------------------------

    async def _flush(self) -> None:
        while self._queue and self.failure is None:
            # A frame that begins a segment begins a write.
            starts = (at for at, pending in enumerate(self._queue) if at and pending.start)
            until = next(starts, len(self._queue))
            batch, self._queue = self._queue[:until], self._queue[until:]
            try:
                await self._write_until_done(batch)
            except OSError as error:
                self._fail(VolumeFailedError(f"log {self.folder} cannot be written: {error}"))
                return
            self.durable_number = batch[-1].number
            self._tell_durable()
            for pending in batch:
                self.unwritten_bytes -= pending.size
                if pending.blob is not None:
                    self._staged.pop(pending.blob[0], None)
            self._wake()

    def _tell_durable(self) -> None:
        """Proves later that the last frame was whole once. Not synced: it may lag, never run ahead."""
        if self._cell is not None:
            try:
                self._cell.write(pack_told(self.durable_number))
            except OSError as error:
                logger.info("log_cell_failed", extra={"folder": self.folder, "error": str(error)})

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
            if batch[0].start or self._end >= limits.SEGMENT_BYTES_MAX or self._file is None:
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
            self.disk.truncate(segment_path(self.folder, self._segment), self._end)

    def _write_blobs(self, batch: list[Pending]) -> None:
        blobs = [pending.blob for pending in batch if pending.blob is not None]
        for name, content in blobs:
            write_file(self.disk, f"{self.folder}/blobs/{name}", content)
            self.bytes_written += len(content)
        if blobs:
            self.disk.fsync_dir(f"{self.folder}/blobs")

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
        path = segment_path(self.folder, self._segment)
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
        if batch and batch[0].start is not None:
            self._starts[self._segment] = batch[0].start

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
