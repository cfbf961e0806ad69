"""Errors that a person at a terminal sees: one line that says what to do."""

from gristmill_contracts.errors import GristmillError


class CommandError(GristmillError):
    """The command cannot do what it was asked to. Exit code 1."""

    code = "command_failed"


class NotRunningError(CommandError):
    """There is no running instance on this data folder."""

    code = "not_running"
