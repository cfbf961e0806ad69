"""Process 1 of the cluster's PID namespace: keep running what `want/` names, reap the rest.

When it ends the kernel kills every process of the namespace, pods included. That is why a teardown can
leave nothing behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from components import commands
from plan import HERE, Plan, write

RESTART_PAUSE_S = 0.5  # between two starts of one component
TERMINATE_S = 10.0  # from SIGTERM to SIGKILL of a component that is wanted no more
TICK_S = 0.05


@dataclass(slots=True)
class Child:
    pid: int
    told_at: float | None = None  # when SIGTERM was sent


@dataclass(slots=True, kw_only=True)
class Keeper:
    plan: Plan
    argv: dict[str, list[str]]
    running: dict[str, Child] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    stopping: bool = False

    def on_term(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.on_term)
        spawn(self.plan, "bring-up", [sys.executable, str(HERE / "cluster.py"), "bring-up"])
        while not self.stopping:
            self.reap()
            wanted = set(os.listdir(self.plan.folder / "want")) & self.argv.keys()
            for name in wanted - self.running.keys():
                self.start(name)
            for name in self.running.keys() - wanted:
                self.stop(self.running[name])
            time.sleep(TICK_S)

    def reap(self) -> None:
        """Collect every process that has ended, the orphans that were left to us included."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for name in [name for name, child in self.running.items() if child.pid == pid]:
                del self.running[name]
                self.pid_file(name).unlink(missing_ok=True)

    def start(self, name: str) -> None:
        now = time.monotonic()
        if now - self.started.get(name, -RESTART_PAUSE_S) < RESTART_PAUSE_S:
            return
        self.started[name] = now
        try:
            extra = json.loads((self.plan.folder / "want" / name).read_text() or "[]")
            child = Child(spawn(self.plan, name, [*self.argv[name], *extra]))
        except (OSError, ValueError) as error:  # a missing program must not end process 1
            print(f"cannot start {name}: {error}", flush=True)
            return
        self.running[name] = child
        write(self.pid_file(name), str(child.pid))

    @staticmethod
    def stop(child: Child) -> None:
        now = time.monotonic()
        if child.told_at is None:
            child.told_at = now
            os.kill(child.pid, signal.SIGTERM)
        elif now - child.told_at > TERMINATE_S:
            os.kill(child.pid, signal.SIGKILL)

    def pid_file(self, name: str) -> Path:
        return self.plan.folder / "run" / f"{name}.pid"


def spawn(plan: Plan, name: str, argv: list[str]) -> int:
    """Start a program in a session of its own, its output appended to log/NAME.log; returns its PID."""
    log = os.open(
        plan.folder / "log" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    environment["HOME"] = str(plan.folder / "home")
    environment["GRISTMILL_CLUSTER_DIR"] = str(plan.folder)
    try:
        return os.posix_spawnp(
            argv[0],
            argv,
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
            setsid=True,
            setsigdef=[signal.SIGTERM],
        )
    finally:
        os.close(log)


def keep(plan: Plan) -> None:
    Keeper(plan=plan, argv=commands(plan)).run()
