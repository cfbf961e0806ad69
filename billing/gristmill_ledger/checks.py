"""Bounds of the fields that every message shares. Each refusal names field, value and remedy."""

import re
from typing import Final

from gristmill_contracts import limits
from gristmill_contracts.errors import InvalidRequestError

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def quantity(field: str, value: int) -> int:
    """A count or a time: 0 to 2^63 - 1."""
    if not 0 <= value <= limits.QUANTITY_MAX:
        raise InvalidRequestError(f"{field} is {value}; it must be 0 to {limits.QUANTITY_MAX}")
    return value


def whole_number(field: str, text: str) -> int:
    """A quantity in a query string."""
    if not (text.isascii() and text.isdecimal()):
        raise InvalidRequestError(f"{field} is {text[:40]!r}; it must be a whole number")
    return quantity(field, int(text.lstrip("0")[:20] or "0"))


def signed(field: str, value: int) -> int:
    """A time that may be wrong: any 64-bit integer."""
    if not -limits.QUANTITY_MAX <= value <= limits.QUANTITY_MAX:
        raise InvalidRequestError(f"{field} is {value}; it must fit into 64 bits")
    return value


def text(field: str, value: str, *, empty: bool = False) -> str:
    """A name, id or path. PostgreSQL cannot hold U+0000, so nobody may send it."""
    if not value and not empty:
        raise InvalidRequestError(f"{field} is empty; give it a value")
    if len(value) > limits.LEDGER_TEXT_CHARS_MAX:
        raise InvalidRequestError(
            f"{field} has {len(value)} characters; the most is {limits.LEDGER_TEXT_CHARS_MAX}"
        )
    if "\0" in value:
        raise InvalidRequestError(f"{field} holds a NUL character; remove it")
    return value


def tenant_name(value: str) -> str:
    """A DNS label, for a tenant is a namespace in the cluster."""
    if len(value) > limits.SESSION_NAME_CHARS_MAX or not _NAME.fullmatch(value):
        raise InvalidRequestError(
            f"tenant {value!r} is not a name of 1 to {limits.SESSION_NAME_CHARS_MAX} lower-case "
            "letters, digits and inner hyphens"
        )
    return value
