"""One integer for a session's weights and moments, to compare a replay with the first run."""

import hashlib

from torch import Tensor


def bytes_of(value: Tensor) -> memoryview:
    """The tensor's bytes on the host."""
    return memoryview(value.detach().cpu().contiguous().numpy().data).cast("B")


def checksum(step: int, *buffers: Tensor) -> int:
    """The first 63 bits of a SHA-256, so that it fits any integer column."""
    digest = hashlib.sha256(f"{step}".encode())
    for buffer in buffers:
        digest.update(bytes_of(buffer))
    return int.from_bytes(digest.digest()[:8], "big") >> 1
