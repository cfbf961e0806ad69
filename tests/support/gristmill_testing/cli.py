"""Commands run in this process, on a data folder that may pretend to be running."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from gristmill_cli.__main__ import app
from gristmill_cli.local.instance import Instance, announce, take_lock
from gristmill_cli.local.layout import DATA_DIR_VARIABLE, Layout, make_folders
from gristmill_sessions.local import LocalStore, open_local_store


@dataclass(frozen=True, slots=True)
class Commands:
    """`run` answers with exit code and output; `ok` fails the test unless the code is 0."""

    data_dir: Path

    @property
    def layout(self) -> Layout:
        return Layout(self.data_dir)

    @property
    def store(self) -> LocalStore:
        self.data_dir.mkdir(exist_ok=True)
        return open_local_store(self.layout.store)

    def run(self, *arguments: str, text: str | None = None) -> Result:
        environment = {DATA_DIR_VARIABLE: str(self.data_dir)}
        return CliRunner().invoke(app, list(arguments), input=text, env=environment)

    def ok(self, *arguments: str, text: str | None = None) -> str:
        result = self.run(*arguments, text=text)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--output", "json"))

    def refused(self, *arguments: str, text: str | None = None, code: int = 1) -> str:
        """The one line on standard error of a command that fails."""
        result = self.run(*arguments, text=text)
        assert result.exit_code == code, result.output
        lines = result.stderr.strip().splitlines()
        assert code != 1 or len(lines) == 1, lines
        assert "Traceback" not in result.output
        return "\n".join(lines)

    @contextmanager
    def pretend_running(self, ledger_url: str = "http://127.0.0.1:9") -> Iterator[None]:
        """Hold the lock and announce an instance, as `gristmill up` does."""
        make_folders(self.layout)
        with take_lock(self.layout):
            announce(
                self.layout,
                Instance(
                    pid=os.getpid(),
                    url="http://127.0.0.1:8450",
                    ledger_url=ledger_url,
                    started_us=1,
                    ready=True,
                ),
            )
            yield
