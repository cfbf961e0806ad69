"""Reads JSON bodies, and the members of the objects in them. Pure.

A member that is null is absent, as on the real wire. Booleans are not numbers here.
"""

import json
import math
from collections.abc import Collection
from typing import Any, Final

import msgspec

from gristmill_contracts.errors import InvalidRequestError

Document = dict[str, Any]  # Any: JSON
VALUE_CHARS_SHOWN: Final = 100


def read_object(body: bytes) -> Document:
    """The JSON object in a body. Raises InvalidRequestError.

    NaN and infinities are let through, as Python's clients send them: whoever reads the number refuses
    it by name, and the rest of the request stays readable.
    """
    try:
        document = _read(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not JSON ({type(error).__name__}: {str(error)[:VALUE_CHARS_SHOWN]})"
        ) from error
    if not isinstance(document, dict):
        raise InvalidRequestError(f"the body is a JSON {_kind(document)}, not an object")
    return document


def _read(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return json.loads(body)


def members(
    value: object, path: str, required: Collection[str] = (), optional: Collection[str] = ()
) -> Document:
    """An object's members that are not null, if they are those named. Raises InvalidRequestError."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} is a JSON {_kind(value)}, not an object")
    for name in value:
        if name not in required and name not in optional:
            known = ", ".join((*required, *optional)) or "none"
            raise InvalidRequestError(
                f"{path}.{_shown_name(name)} is not a member; members: {known}"
            )
    found = {name: inner for name, inner in value.items() if inner is not None}
    for name in required:
        if name not in found:
            raise InvalidRequestError(f"{path}.{name} is required and missing")
    return found


def one_of(value: object, path: str, names: Collection[str]) -> tuple[str, Any]:
    """The one member of a union that is set. Raises InvalidRequestError."""
    found = members(value, path, optional=names)
    if len(found) != 1:
        raise InvalidRequestError(
            f"{path} has {len(found)} of its members set ({', '.join(found) or 'none'}); set exactly one "
            f"of {', '.join(names)}"
        )
    ((name, inner),) = found.items()
    return name, inner


def integer(value: object, path: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(
            f"{path} is {shown(value)}; it must be an integer of {low} to {high}"
        )
    return value


def number(value: object, path: str, low: float, high: float, *, above_low: bool = False) -> float:
    """A finite number. above_low: `low` itself is out of range."""
    if type(value) in (int, float) and isinstance(value, int | float):
        inside = low < value <= high if above_low else low <= value <= high
        if inside and math.isfinite(value):
            return float(value)
    bounds = f"above {low:g} and at most {high:g}" if above_low else f"{low:g} to {high:g}"
    raise InvalidRequestError(f"{path} is {shown(value)}; it must be a number, {bounds}")


def boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{path} is {shown(value)}; it must be true or false")
    return value


def text(value: object, path: str, chars_max: int, chars_min: int = 0) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{path} is {shown(value)}; it must be a string")
    if not chars_min <= len(value) <= chars_max:
        raise InvalidRequestError(
            f"{path} has {len(value)} characters; it must have {chars_min} to {chars_max}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{path} holds half of a surrogate pair; send valid Unicode"
        ) from error
    return value


def choice(value: object, path: str, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequestError(
            f"{path} is {shown(value)}; it must be one of {', '.join(choices)}"
        )
    return value


def array(value: object, path: str, items_max: int, items_min: int = 0) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path} is a JSON {_kind(value)}, not an array")
    if not items_min <= len(value) <= items_max:
        raise InvalidRequestError(
            f"{path} has {len(value)} elements; it must have {items_min} to {items_max}"
        )
    return value


def shown(value: object) -> str:
    """A value for a message, cut to a line. Lists and objects by their kind alone."""
    if isinstance(value, list | dict):
        return f"a JSON {_kind(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**40:
        return "an integer of more than 40 digits"  # str() of a huge one raises.
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    shown_text = ascii(value)
    return (
        shown_text
        if len(shown_text) <= VALUE_CHARS_SHOWN
        else shown_text[:VALUE_CHARS_SHOWN] + "..."
    )


def _shown_name(name: str) -> str:
    return name if name.isidentifier() and len(name) <= VALUE_CHARS_SHOWN else shown(name)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return names.get(type(value), "null")
