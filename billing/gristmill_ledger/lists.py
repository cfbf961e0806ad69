"""A list as one parameter of a statement. Spelled out value by value, a list is another statement for each
length: composed, parsed and planned anew each time."""

import json
from collections.abc import Collection
from typing import Any

from sqlalchemy import ARRAY, Boolean, ColumnElement, Dialect, Text, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine


class TextList(TypeDecorator[Collection[str]]):
    """TEXT[] on PostgreSQL, a JSON array on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:  # Any: of either database
        if dialect.name == "postgresql":
            return dialect.type_descriptor(ARRAY(Text()))
        return dialect.type_descriptor(Text())

    def process_bind_param(
        self, value: Collection[str] | None, dialect: Dialect
    ) -> list[str] | str | None:
        if value is None:
            return None
        return list(value) if dialect.name == "postgresql" else json.dumps(list(value))


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
    return f"{compiler.process(column, **options)} = ANY ({compiler.process(values, **options)})"


@compiles(Among, "sqlite")
def _sqlite(element: Among, compiler: SQLCompiler, **options: Any) -> str:
    column, values = element.clauses
    listed = compiler.process(values, **options)
    return f"{compiler.process(column, **options)} IN (SELECT value FROM json_each({listed}))"  # noqa: S608
