"""Worker processes that are the ranks of one session, started by torchrun on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gristmill_testing.bare_worker import BareWorker


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class TeamProcesses:
    """torchrun agents by rank; each has one worker below it."""

    folder: Path
    model: Path
    world: int
    base_weights: str = "auto"
    dtype: str = "float32"
    port: int = field(default_factory=free_port)
    agents: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, rank: int) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GRISTMILL_")}
        environment = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "GRISTMILL_WORKER_SOCKET": str(self.folder / "w.sock"),
            "GRISTMILL_WORKER_MODEL_DIR": str(self.model),
            "GRISTMILL_WORKER_ARTIFACTS_DIR": str(self.folder / "artifacts"),
            "GRISTMILL_WORKER_BASE_WEIGHTS": self.base_weights,
            "GRISTMILL_WORKER_DTYPE": self.dtype,
            "GRISTMILL_WORKER_DEVICE": "cpu",
            "GRISTMILL_WORKER_THREADS": "1",
            "GRISTMILL_WORKER_READY_FILE": str(self.folder / f"ready-{rank}"),
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.world),
            "--node-rank", str(rank), "--nproc-per-node", "1", "--max-restarts", "0",
            "--master-addr", "127.0.0.1", "--master-port", str(self.port), "-m", "gristmill_worker",
        ]  # fmt: skip
        with (self.folder / f"log-{rank}").open("ab") as log:
            self.agents[rank] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def session(self, name: str = "state", within_s: float = 120) -> BareWorker:
        """Waits until the team serves."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            session = BareWorker(self.folder / "w.sock", self.folder / name)
            try:
                if session.status().ready:
                    return session
            except OSError:
                pass
            session.hang_up()
            time.sleep(0.1)
        raise AssertionError(self.logs())

    def logs(self) -> str:
        texts = [(self.folder / f"log-{rank}").read_text() for rank in self.agents]
        return "\n".join(texts)

    def worker_pid(self, rank: int) -> int:
        """The worker that the rank's agent started."""
        agent = self.agents[rank].pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        for pid in children:
            if b"gristmill_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise AssertionError(f"the agent {agent} of rank {rank} has no worker: {self.logs()}")

    def end(self) -> dict[int, int]:
        """SIGTERM to all, as the deletion of their pods does; exit statuses by rank."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        return {rank: agent.wait(60) for rank, agent in self.agents.items()}
