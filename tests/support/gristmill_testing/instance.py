"""A real `gristmill up` as a process, on a free port and a data folder of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from gristmill_cli.local.instance import find_instance
from gristmill_cli.local.layout import Layout
from gristmill_testing.books import Books

START_S: Final = 180.0
STOP_S: Final = 90.0
POLL_S: Final = 0.02
T = TypeVar("T")
SETTINGS: Final = {
    "OMP_NUM_THREADS": "1",
    "GRISTMILL_WORKER_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Many processes share few cores: one thread each."""


@dataclass(slots=True, kw_only=True)
class RunningGristmill:
    """What a test may ask of the instance, and do to it."""

    data_dir: Path
    model: str
    """Name of the base model."""
    model_path: Path
    process: subprocess.Popen[bytes]
    variables: Mapping[str, str]
    environment: dict[str, str]
    """What `gristmill env` prints for the default tenant."""

    @property
    def layout(self) -> Layout:
        return Layout(self.data_dir)

    @property
    def url(self) -> str:
        found = find_instance(self.layout)
        assert found is not None, "gristmill does not run"
        return found.url

    @property
    def ledger_url(self) -> str:
        found = find_instance(self.layout)
        assert found is not None, "gristmill does not run"
        return found.ledger_url

    @property
    def worker_socket(self) -> Path:
        return Path(self._row("worker")["socket"])

    @property
    def books(self) -> Books:
        return Books(self.ledger_url, self.cli)

    # --- processes -------------------------------------------------------------------------------

    def processes(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self.layout.processes.read_bytes()))
        except FileNotFoundError:
            return []

    def _row(self, part: str, tenant: str = "default") -> dict[str, Any]:
        """The row of a part, of the given tenant where each tenant has its own."""
        rows = [row for row in self.processes() if row["part"] == part]
        mine = [row for row in rows if row["tenant"] in (None, tenant)]
        return (mine or rows)[0]

    def pid_of(self, part: str, tenant: str = "default") -> int:
        """The process that runs now; waits for one that is being started again."""
        return _wait_for(lambda: self._living(part, tenant), f"a {part} to run", START_S)

    def _living(self, part: str, tenant: str) -> int | None:
        try:
            pid = self._row(part, tenant)["pid"]
        except IndexError:
            return None
        return pid if pid is not None and _is_alive(pid) else None

    def kill(self, part: str, tenant: str = "default") -> int:
        """kill -9; returns the pid. The supervisor starts the part again."""
        while True:
            pid = self.pid_of(part, tenant)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            _wait_for(lambda pid=pid: not _is_alive(pid) or None, f"{part} {pid} to be gone", 10)  # type: ignore[misc]
            return pid

    def wait_ready(self, part: str, tenant: str = "default") -> None:
        _wait_for(lambda: self._row(part, tenant)["ready"] or None, f"{part} to be ready", START_S)

    # --- the command line ------------------------------------------------------------------------

    def cli(self, *arguments: str, check: bool = True) -> str:
        """Standard output of `gristmill ...` on this data folder. Raises if it failed."""
        done = self.run_cli(*arguments)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def run_cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gristmill_cli", *arguments],
            env={**self.variables, "GRISTMILL_DATA_DIR": str(self.data_dir)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def environment_of(self, tenant: str) -> dict[str, str]:
        """Another tenant's, which is made with its first key."""
        self.cli("keys", "create", "--tenant", tenant)
        return dict(json.loads(self.cli("env", "--tenant", tenant, "--output", "json")))

    # --- the books -------------------------------------------------------------------------------

    def usage_by_api(self, session: str) -> dict[str, int]:
        return self.books.usage(session)

    def usage_by_cli(self, session: str) -> dict[str, int]:
        return self.books.usage_by_cli(session)

    def operations_run(self, session: str, operation: str | None = None) -> int:
        return self.books.operations(session, operation=operation)

    def attempts(self, session: str) -> int:
        return self.books.operations(session, kind="attempt")

    # --- start and stop --------------------------------------------------------------------------

    def stop(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM, as a service manager would; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def start(self) -> None:
        """Start it again on the same folder."""
        self.process = _spawn(self.data_dir, self.model, self.variables)
        _wait_until_ready(self.process, self.layout)


@contextmanager
def running_gristmill(
    data_dir: Path, *, model: Path, environment: Mapping[str, str] | None = None
) -> Iterator[RunningGristmill]:
    """`model`: a prepared folder. `environment`: further settings, as GRISTMILL_METER_GAP_TIMEOUT_S."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GRISTMILL_", "AWS_", "SAGEMAKER_"))
    }
    variables = {**inherited, **SETTINGS, **(environment or {})}
    layout = Layout(data_dir)
    process = _spawn(data_dir, str(model), variables)
    try:
        _wait_until_ready(process, layout)
        instance = RunningGristmill(
            data_dir=data_dir,
            model=model.name,
            model_path=model,
            process=process,
            variables=variables,
            environment={},
        )
        instance.environment = dict(json.loads(instance.cli("env", "--output", "json")))
        yield instance
        process = instance.process
    finally:
        _end(process)


def _spawn(data_dir: Path, model: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gristmill_cli", "up", "--data-dir", str(data_dir)]
    command += ["--model", model]
    if not (data_dir / "run" / "ports.json").exists():
        command += ["--port", "0"]
    with (data_dir / "up.out").open("ab") as output:
        return subprocess.Popen(command, env=dict(variables), stdout=output, stderr=output)


def _wait_until_ready(process: subprocess.Popen[bytes], layout: Layout) -> None:
    def look() -> bool | None:
        assert process.poll() is None, (layout.root / "up.out").read_text()
        found = find_instance(layout)
        return True if found is not None and found.ready else None

    _wait_for(look, "gristmill to be ready", START_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for(look: Callable[[], T | None], what: str, timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(POLL_S)
    return found


def _is_alive(pid: int) -> bool:
    """A zombie is dead: its parent has only not looked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
