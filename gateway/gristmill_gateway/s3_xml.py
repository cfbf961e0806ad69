"""The XML that S3 speaks: written by hand, read without entities, document types or deep nesting. Pure."""

import xml.parsers.expat
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final
from xml.sax.saxutils import escape

from gristmill_contracts.errors import InvalidRequestError

NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
DEPTH_MAX: Final = 8


@dataclass(slots=True)
class Element:
    """A parsed element: its local name, its text without surrounding space, its children."""

    name: str
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def find(self, name: str) -> "Element | None":
        return next((child for child in self.children if child.name == name), None)


def render(root: str, content: list[tuple[str, object]], namespace: str = NAMESPACE) -> bytes:
    """An XML document. A value is text, a number, a boolean or a nested list of (name, value)."""
    declared = f' xmlns="{namespace}"' if namespace else ""
    body = "".join(_element(name, value) for name, value in content)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}{declared}>{body}</{root}>'.encode()


def _element(name: str, value: object) -> str:
    if isinstance(value, list):
        inner = "".join(_element(child, grandchild) for child, grandchild in value)
    elif isinstance(value, bool):
        inner = "true" if value else "false"
    else:
        inner = escape(_printable(str(value)))
    return f"<{name}>{inner}</{name}>"


def _printable(text: str) -> str:
    """XML 1.0 has no control characters, and UTF-8 no surrogates: a message may quote either."""
    return "".join(
        c
        if (c >= " " or c in "\t\n") and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff"
        else "?"
        for c in text
    )


def timestamp(time_us: int) -> str:
    """Microseconds since 1970 as ISO 8601 with milliseconds."""
    moment = datetime.fromtimestamp(time_us / 1e6, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time_us // 1000 % 1000:03d}Z"


def parse(body: bytes) -> Element:
    """The root element of a document. Raises InvalidRequestError."""
    builder = _Builder()
    parser = xml.parsers.expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.characters
    # Without a document type there are no entities to expand, and so nothing to blow up.
    parser.StartDoctypeDeclHandler = builder.refuse_document_type
    try:
        parser.Parse(body, True)
    except xml.parsers.expat.ExpatError as error:
        raise InvalidRequestError(f"the body is not well-formed XML: {error}") from error
    except (LookupError, ValueError) as error:
        raise InvalidRequestError(f"the body's XML cannot be read: {error}") from error
    return builder.root.children[0]


class _Builder:
    """Collects expat's events into a tree."""

    def __init__(self) -> None:
        self.root = Element("")
        self._open = [self.root]

    def start(self, name: str, _attributes: dict[str, str]) -> None:
        if len(self._open) > DEPTH_MAX:
            raise InvalidRequestError(f"the body's XML is nested deeper than {DEPTH_MAX}")
        element = Element(name.rpartition(" ")[2])
        self._open[-1].children.append(element)
        self._open.append(element)

    def end(self, _name: str) -> None:
        self._open.pop()

    def characters(self, text: str) -> None:
        self._open[-1].text += text

    def refuse_document_type(self, *_arguments: object) -> None:
        raise InvalidRequestError("the body's XML declares a document type; leave it out")
