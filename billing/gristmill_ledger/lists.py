"""A list as one parameter of a statement. Spelled out value by value, a list is another statement for each
length: composed, parsed and planned anew each time."""

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Dialect, Text, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


def array_text(values: Collection[str | int]) -> str:
    """A list as PostgreSQL reads an array: in quotes, whatever the values hold. The driver's own way with lists
    takes ten times as long."""
    quoted = (str(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return '{"' + '","'.join(quoted) + '"}' if values else "{}"


class TextList(TypeDecorator[Collection[str]]):
    """The text of an array on PostgreSQL, of a JSON array on SQLite."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Collection[str] | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return array_text(value) if dialect.name == "postgresql" else json.dumps(list(value))


class Among(FunctionElement[bool]):
    """`column` is one of a list. Made by `among`."""

    type = Boolean()
    inherit_cache = True
    name = "among"


def among(column: ColumnElement[str], parameter: str) -> Among:
    """Whether a column holds one of the texts that are given as this parameter."""
    return Among(column, bindparam(parameter, type_=TextList()))


@compiles(Among, "postgresql")
def _postgresql(element: Among, compiler: SQLCompiler, **options: Any) -> str:
    column, values = element.clauses
    listed = compiler.process(values, **options)
    return f"{compiler.process(column, **options)} = ANY (CAST({listed} AS TEXT[]))"


@compiles(Among, "sqlite")
def _sqlite(element: Among, compiler: SQLCompiler, **options: Any) -> str:
    column, values = element.clauses
    listed = compiler.process(values, **options)
    return f"{compiler.process(column, **options)} IN (SELECT value FROM json_each({listed}))"  # noqa: S608
