"""Settings of a process: read once from its environment, refused with a message where one is wrong."""

import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings

S = TypeVar("S", bound=BaseSettings)


def read_settings(
    settings: type[S], parser: ArgumentParser, arguments: Sequence[str] | None = None
) -> S:
    """Answer `--help`, then read the environment. A misspelt or wrong variable ends the process with 2."""
    parser.parse_args(arguments)
    misspelt = unknown_variables(settings)
    if misspelt:
        parser.error(
            f"unknown settings in the environment: {', '.join(misspelt)}; --help lists those that exist"
        )
    try:
        return settings()
    except ValidationError as error:
        parser.error(str(error))


def unknown_variables(
    settings: type[BaseSettings], environ: Mapping[str, str] | None = None
) -> list[str]:
    """Names in the environment that begin with the prefix and set nothing: most likely misspelt."""
    known = {_variable(settings, name) for name in settings.model_fields}
    prefix = _variable(settings, "")
    names = os.environ if environ is None else environ
    return sorted(n for n in names if n.upper().startswith(prefix) and n.upper() not in known)


def describe_settings(settings: type[BaseSettings]) -> str:
    """One line for each variable, for `--help`."""
    fields = settings.model_fields
    width = max(len(name) for name in fields)
    return "\n".join(
        f"  {_variable(settings, name):<{width + len(_variable(settings, ''))}} "
        + ("required" if field.is_required() else f"default {field.default!s}")
        for name, field in fields.items()
    )


def _variable(settings: type[BaseSettings], name: str) -> str:
    return (settings.model_config.get("env_prefix", "") + name).upper()
