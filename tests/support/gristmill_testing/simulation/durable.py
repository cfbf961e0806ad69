"""What the log of a session says on its disk, synced: read apart from what its meter believes of it."""

from dataclasses import dataclass, field

from gristmill_contracts.ids import SessionUid
from gristmill_contracts.usage import UsageEvent
from gristmill_meter import frames
from gristmill_meter.segment import read_segment
from gristmill_testing.fake_disk import FakeDisk

Key = tuple[str, int]


@dataclass(slots=True)
class DurableLog:
    """`look` reads what has become durable since. Of a disk that a crash replaced, all is read anew."""

    uid: SessionUid
    streams: set[Key] = field(default_factory=set)
    results: set[Key] = field(default_factory=set)
    billed: set[tuple[str, Key]] = field(default_factory=set)
    """Kind of usage, and operation."""
    _disk: FakeDisk | None = None
    _read: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """Path of a segment -> its bytes when it was read, and how many frames were in them."""

    def look(self, disk: FakeDisk) -> None:
        if disk is not self._disk:
            self._disk, self._read = disk, {}
            for seen in (self.streams, self.results, self.billed):
                seen.clear()
        for path, file in disk.durable_names.items():
            known, count = self._read.get(path, (b"", 0))
            if file.durable is known or not path.startswith(f"{self.uid}/log-"):
                continue
            segment = read_segment(file.durable)
            payloads = [] if segment is None else segment.payloads
            for payload in payloads[count:]:
                self._note(frames.decode_frame(payload))
            self._read[path] = file.durable, len(payloads)

    def _note(self, frame: frames.Frame) -> None:
        match frame:
            case frames.Intent(streaming=True):
                self.streams.add((frame.stream, frame.number))
            case frames.Result():
                key = frame.stream, frame.number
                self.results.add(key)
                if frame.stream == "train" or key in self.streams:
                    self.billed.add(("usage", key))
            case frames.Failed(counts=counts) if counts is not None:
                self.billed.add(("usage", (frame.stream, frame.number)))
            case frames.Claim():
                self.billed.add(("usage", ("log", frame.number)))
            case frames.Expired():
                self.billed |= {("attempt", ("log", number)) for number in frame.numbers}

    def may_leave(self, key: Key) -> bool:
        """Whether the operation's result and the record that bills it are there."""
        return key in self.results and ("usage", key) in self.billed

    def bills(self, event: UsageEvent) -> bool:
        return (event.kind, (event.stream, event.number)) in self.billed
