"""On the machine, outside the namespaces: start the cluster, find it, end it, and leave nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import configuration
from plan import HERE, Plan, check_folder, name_of, write
from waiting import wait_for

UP_S = 180
DOWN_S = 10
CGROUPS = Path("/sys/fs/cgroup")
NAMESPACES = (
    "--net",
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--ipc",
    "--uts",
    "--fork",
    "--mount-proc",
)


def init_pid(folder: Path) -> int | None:
    """The PID of the cluster's process 1 as the machine sees it; None when the cluster is down."""
    try:
        pid, begin = (folder / "init.pid").read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if started_at(int(pid)) == begin else None


def started_at(pid: int) -> str | None:
    """Start time in clock ticks: with the PID it names a process for ever, though PIDs are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def up(plan: Plan) -> None:
    """Start the cluster and wait until it serves. RuntimeError with the log's end if it does not."""
    check_folder(plan.folder)
    down(plan.folder)
    plan.folder.mkdir(parents=True)
    configuration.write_all(plan)
    make_cgroups(plan.name)
    launcher = launch(plan)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    wait_for(
        "the cluster's process 1",
        lambda: bool(children.exists() and children.read_text().strip()),
        10,
    )
    pid = int(children.read_text())
    write(plan.folder / "init.pid", f"{pid} {started_at(pid)}")
    try:
        follow(plan, launcher)
    except BaseException:
        print(f"the logs are in {plan.folder}/log; `cluster.py down` removes them", file=sys.stderr)
        stop_init(plan.folder)
        raise


def launch(plan: Plan) -> subprocess.Popen[bytes]:
    program = [sys.executable, str(HERE / "cluster.py"), "init"]
    environment = {**os.environ, "GRISTMILL_CLUSTER_DIR": str(plan.folder)}
    with (plan.folder / "log/init.log").open("a") as log:
        return subprocess.Popen(
            ["unshare", *NAMESPACES, *program],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )


def follow(plan: Plan, launcher: subprocess.Popen[bytes]) -> None:
    """Print the steps of the start as they are noted, until it is over."""
    log, shown = plan.folder / "log/bring-up.log", 0
    deadline = time.monotonic() + UP_S
    while True:
        ready, failed = ((plan.folder / name).exists() for name in ("ready", "failed"))
        text = log.read_text() if log.exists() else ""
        print(text[shown:], end="", flush=True)
        shown = len(text)
        if ready:
            return
        if failed or launcher.poll() is not None:
            raise RuntimeError(f"the cluster in {plan.folder} did not start")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster in {plan.folder} was not up after {UP_S} s")
        time.sleep(0.05)


def down(folder: Path) -> None:
    """Stop and remove everything; nothing to do for a cluster that is not there."""
    stop_init(folder)
    left = remove_cgroups(name_of(folder))
    if folder.exists():
        refuse_foreign(folder)
        shutil.rmtree(folder)
    if left:
        raise RuntimeError(f"cgroups left behind: {', '.join(left)}")


def refuse_foreign(folder: Path) -> None:
    """Never remove a folder that holds something other than a cluster."""
    if any(folder.iterdir()) and not (folder / "want").is_dir():
        raise RuntimeError(f"{folder} is not the state folder of a cluster: it is left as it is")


def stop_init(folder: Path) -> None:
    pid = init_pid(folder)
    if pid is None:
        return
    # The kubelet first, so that no container starts while the rest goes.
    (folder / "want/kubelet").unlink(missing_ok=True)
    os.kill(pid, signal.SIGTERM)
    try:
        wait_for("the cluster's end", lambda: init_pid(folder) is None, DOWN_S)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        wait_for("the cluster's end after SIGKILL", lambda: init_pid(folder) is None, DOWN_S)


def cgroup_roots() -> list[Path]:
    """The roots of all hierarchies (version 1), or the one root (version 2)."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    folders = [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]
    return [path for path in folders if (path / "cgroup.procs").exists()]


def make_cgroups(name: str) -> None:
    for root in cgroup_roots():
        (root / name).mkdir(exist_ok=True)
        for knob in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # empty in a new one, and then no process may enter
            if (root / knob).exists() and (root / name / knob).exists():
                (root / name / knob).write_text((root / knob).read_text())


def remove_cgroups(name: str) -> list[str]:
    """Remove the cluster's trees from the leaves up; returns what would not go."""
    folders = [
        folder for root in cgroup_roots() for folder, _, _ in os.walk(root / name, topdown=False)
    ]
    return [folder for folder in folders if not remove_cgroup(folder)]


def remove_cgroup(folder: str, seconds: float = 3) -> bool:
    """A cgroup is busy for a moment after its last process was killed."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def enter(folder: Path, *argv: str, everything: bool = False) -> list[str]:
    """A command that runs argv in the cluster's network, or in all of its namespaces."""
    pid = init_pid(folder)
    if pid is None:
        raise RuntimeError(f"no cluster is up in {folder}; start one with `make cluster`")
    return ["nsenter", "-t", str(pid), *(["-a"] if everything else ["-n"]), "--", *argv]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    name: str
    resident_kib: int


def processes(folder: Path) -> list[Process]:
    """Everything that descends from the cluster's process 1, pods included."""
    init = init_pid(folder)
    if init is None:
        return []
    everything = {pid: process for pid in _pids() if (process := _describe(pid)) is not None}
    family = {init}
    while more := {pid for pid, (parent, _) in everything.items() if parent in family} - family:
        family |= more
    return [everything[pid][1] for pid in sorted(family & everything.keys())]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _describe(pid: int) -> tuple[int, Process] | None:
    """The parent's PID and what the process is; None for one that has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    memory = int(fields.get("VmRSS", "0 kB").split()[0])
    return int(fields["PPid"]), Process(
        pid=pid, name=os.path.basename(argv[0].decode()), resident_kib=memory
    )
