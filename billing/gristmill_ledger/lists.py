"""A list as one parameter of a statement. Spelled out value by value, a list is another statement for each
length: composed, parsed and planned anew each time."""

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Dialect, Text, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.operators import OperatorType
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType


def array_text(values: Collection[str | int]) -> str:
    """A list as PostgreSQL reads an array: in quotes, whatever the values hold. The driver's own way with lists
    takes ten times as long."""
    quoted = (str(value).replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return '{"' + '","'.join(quoted) + '"}' if values else "{}"


class TextArray(UserDefinedType[str]):
    """TEXT[] whose values come as the text of an array. As a parameter of that type, and no text that is cast: the
    database would read it anew for each row that it compares."""

    cache_ok = True
    render_bind_cast = True

    def get_col_spec(self, **_options: Any) -> str:
        return "TEXT[]"


class TextList(TypeDecorator[Collection[str]]):
    """The text of an array on PostgreSQL, of a JSON array on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:  # Any: of either database
        if dialect.name == "postgresql":
            return dialect.type_descriptor(TextArray())
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: Collection[str] | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return array_text(value) if dialect.name == "postgresql" else json.dumps(list(value))


class Among(FunctionElement[bool]):
    """`column` is one of a list. Made by `among`."""

    type = Boolean()
    inherit_cache = True
    name = "among"

    def self_group(self, against: OperatorType | None = None) -> "Among":
        """As it is: SQLite would be asked whether it `= 1`, and then use no index."""
        return self


def among(column: ColumnElement[str], parameter: str) -> Among:
    """Whether a column holds one of the texts that are given as this parameter."""
    return Among(column, bindparam(parameter, type_=TextList()))


@compiles(Among, "postgresql")
def _postgresql(element: Among, compiler: SQLCompiler, **options: Any) -> str:
    column, values = element.clauses
    listed = compiler.process(values, **options)
    return f"{compiler.process(column, **options)} = ANY ({listed})"


@compiles(Among, "sqlite")
def _sqlite(element: Among, compiler: SQLCompiler, **options: Any) -> str:
    column, values = element.clauses
    listed = compiler.process(values, **options)
    return f"{compiler.process(column, **options)} IN (SELECT value FROM json_each({listed}))"  # noqa: S608
