"""Which versions of our own messages a process serves: its own, and its neighbours by one.

A message changes only by fields with defaults, and no enumeration grows, so that each side reads what
the other one writes. A process of release n meets n - 1 and n + 1 during every rolling update.
"""

from gristmill_contracts.errors import InvalidRequestError
from gristmill_contracts.http import PROTOCOL_VERSION


def check_protocol(given: str | None) -> None:
    """Raise InvalidRequestError for a peer that is more than one version away.

    `given`: its PROTOCOL_HEADER; None = a peer of before the header, which counts as version 0.
    """
    text = "0" if given is None else given
    known = text.isascii() and text.isdecimal() and abs(int(text[:9]) - PROTOCOL_VERSION) <= 1
    if not known:
        raise InvalidRequestError(
            f"the caller speaks protocol {text[:20]!r} and this process {PROTOCOL_VERSION}; they may "
            "differ by one: upgrade the older one first"
        )
