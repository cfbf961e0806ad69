"""A checksum of a request's body: what a broken proxy or cable changed must not become usage."""

import zlib
from typing import Final

CRC_HEADER: Final = "X-Gristmill-CRC32"
"""CRC-32 of the body (as zlib has it), 8 hexadecimal digits. Optional; one that disagrees is refused."""


def crc_of(content: bytes | bytearray) -> str:
    """The header's value."""
    return f"{zlib.crc32(content):08x}"
