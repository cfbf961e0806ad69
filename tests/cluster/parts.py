"""Our five images: what each installs, starts and runs as. The Dockerfile in images/ says the same to users."""

from __future__ import annotations

from dataclasses import dataclass

REGISTRY = "gristmill.test"
TAG = "dev"
GROUP = 10000  # of everyone: the worker's socket and artifacts are shared through it
SYSTEM_USER = 10001
WORKER_USER = 10002  # not the meter's: a worker cannot edit its own bill
ENVIRONMENT = {
    "HOME": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One image. Its name is also the extra of the wheel that it installs."""

    name: str
    user: int

    @property
    def module(self) -> str:
        return f"gristmill_{self.name}"

    @property
    def reference(self) -> str:
        return f"{REGISTRY}/gristmill-{self.name}:{TAG}"

    @property
    def entry_point(self) -> list[str]:
        return ["python", "-m", self.module]


PARTS = (
    Part(name="operator", user=SYSTEM_USER),
    Part(name="gateway", user=SYSTEM_USER),
    Part(name="ledger", user=SYSTEM_USER),
    Part(name="meter", user=SYSTEM_USER),
    Part(name="worker", user=WORKER_USER),
)
