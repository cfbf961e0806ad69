"""Where everything lies below the data folder. Pure, but for `make_folders`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

DATA_DIR_VARIABLE: Final = "GRISTMILL_DATA_DIR"
DATA_DIR_DEFAULT: Final = "~/.gristmill"
SOCKET_PATH_BYTES_MAX: Final = 100
"""Linux takes 107; a little room is left for temporary names."""


class GroupKey(NamedTuple):
    """Sessions of one tenant on one base model share a meter and a worker."""

    tenant: str
    model: str

    def __str__(self) -> str:
        return f"{self.tenant}.{self.model}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below one data folder."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "store.sqlite"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def operation_key(self) -> Path:
        return self.secrets / "operation.key"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def lock(self) -> Path:
        return self.run / "up.pid"

    @property
    def instance(self) -> Path:
        """What a running instance says of itself."""
        return self.run / "instance.json"

    @property
    def processes(self) -> Path:
        return self.run / "processes.json"

    @property
    def ports(self) -> Path:
        return self.run / "ports.json"

    @property
    def unflushed(self) -> Path:
        """Logs of deleted sessions whose usage never reached the ledger."""
        return self.root / "unflushed"

    def group(self, key: GroupKey) -> Path:
        return self.root / "groups" / key.tenant / key.model

    def assignments(self, key: GroupKey) -> Path:
        return self.group(key) / "assignments"

    def meter(self, key: GroupKey) -> Path:
        return self.group(key) / "meter"

    def worker(self, key: GroupKey) -> Path:
        return self.group(key) / "worker"

    def user_config(self, tenant: str) -> Path:
        """The SDK configuration file that names the tenant's default bucket."""
        return self.run / f"sagemaker-{tenant}.yaml"


def find_data_dir(option: Path | None) -> Path:
    """`--data-dir`, else GRISTMILL_DATA_DIR, else ~/.gristmill; always absolute."""
    chosen = option or Path(os.environ.get(DATA_DIR_VARIABLE) or DATA_DIR_DEFAULT)
    return Path(os.path.abspath(chosen.expanduser()))


def make_folders(layout: Layout) -> None:
    """Only the owner may look inside: keys and logs lie there."""
    layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (layout.artifacts, layout.models, layout.secrets, layout.logs, layout.run):
        folder.mkdir(mode=0o700, exist_ok=True)
    layout.ledger.mkdir(mode=0o700, exist_ok=True)
    if not layout.operation_key.exists():
        write_private(layout.operation_key, os.urandom(32))


def make_group_folders(layout: Layout, key: GroupKey) -> None:
    for folder in (layout.assignments(key), layout.meter(key), layout.worker(key)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_private(path: Path, data: bytes) -> None:
    """Replace a file in one step, durably, readable by its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
