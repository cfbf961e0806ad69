"""What a cluster is made of: its folder, its level, its addresses. Decided once, outside, before anything starts."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Level = Literal["control", "node"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

NODE = "n1"
NODE_IP, WORLD_IP = "172.30.0.2", "172.30.0.1"
OUTSIDE_IP = "203.0.113.10"  # "the internet": it lives in the world's namespace
METADATA_IP = "169.254.169.254"  # a cloud's instance metadata: the world answers there too
POD_CIDR, SERVICE_CIDR = "10.88.0.0/16", "10.96.0.0/16"
FAKE_POD_CIDR = "10.99.0.0/16"  # pods of fake nodes: local addresses, so a test can listen on them
API_IP, DNS_IP = "10.96.0.1", "10.96.0.10"
API_PORT = 6443
POLICY_QUEUE = "98"  # the NFQUEUE number that the firewall rules and the policy agent agree on

# Seconds without a heartbeat until a node is NotReady. Fault tests on the node want it soon; at the
# control level benchmarks starve the heartbeats of fake nodes on two cores.
NODE_GRACE_S: dict[Level, int] = {"node": 8, "control": 60}
# unix socket paths end at 107 bytes; the longest below the folder is kubelet's plugin socket.
FOLDER_BYTES_MAX = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One cluster. Everything that has a name on the machine is named after the folder."""

    folder: Path
    level: Level
    bin: Path
    images: tuple[Path, ...] = ()
    sites: tuple[Path, ...] = ()
    node_grace_s: int = 8
    gpus: int = 8

    @property
    def name(self) -> str:
        return name_of(self.folder)

    @property
    def api(self) -> str:
        return f"https://{NODE_IP}:{API_PORT}"

    def kubeconfig(self, user: str) -> Path:
        return self.folder / "kubeconfig" / user

    def save(self) -> None:
        write(
            self.folder / "plan.json", {key: _plain(value) for key, value in asdict(self).items()}
        )


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def load(folder: Path) -> Plan:
    """The plan of a cluster that was started; FileNotFoundError if none was."""
    content = json.loads((folder / "plan.json").read_text())
    return Plan(
        folder=Path(content["folder"]),
        level=content["level"],
        bin=Path(content["bin"]),
        images=tuple(map(Path, content["images"])),
        sites=tuple(map(Path, content["sites"])),
        node_grace_s=content["node_grace_s"],
        gpus=content["gpus"],
    )


def name_of(folder: Path) -> str:
    """The name of the cluster's cgroup; clusters in different folders live side by side."""
    return "gristmill-" + hashlib.sha256(str(folder).encode()).hexdigest()[:8]


def default_folder() -> Path:
    return Path(os.environ.get("GRISTMILL_CLUSTER_DIR", "/var/tmp/gristmill-cluster")).absolute()


def check_folder(folder: Path) -> None:
    """ValueError for a folder whose unix sockets would have no valid path."""
    if len(os.fsencode(folder)) > FOLDER_BYTES_MAX:
        raise ValueError(
            f"cluster folder {folder} is longer than {FOLDER_BYTES_MAX} bytes: unix sockets below it"
            " would have no valid path; set GRISTMILL_CLUSTER_DIR to a shorter one"
        )


def write(path: Path, content: object) -> Path:
    """Write text as it is and anything else as JSON, in one step, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    new.replace(path)
    return path
