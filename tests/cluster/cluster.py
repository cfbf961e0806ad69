"""The test cluster: a real Kubernetes in namespaces of its own, on this machine, without a container engine.

  cluster.py build                        programs and images, from the cache where they are there
  cluster.py is-built                     fails where `build` would have something to do
  cluster.py up [--level control|node]    start it and wait until it serves
  cluster.py down                         stop and remove everything
  cluster.py status                       what runs
  cluster.py exec -- COMMAND ...          a command in the cluster's network, KUBECONFIG set
  cluster.py kubectl|helm ARGUMENTS ...   as the cluster's administrator
  cluster.py ctr ARGUMENTS ...            containerd's client
  cluster.py load                         our images, of the code as it is now, into the running node
  cluster.py start NAME [-- ARGUMENTS]    one component; more arguments only where it was stopped
  cluster.py stop NAME                    SIGTERM, and not started again
  cluster.py kill NAME                    SIGKILL; started again at once
  cluster.py signal NAME SIGNAL           STOP freezes a component, CONT thaws it

The state folder is $GRISTMILL_CLUSTER_DIR (/var/tmp/gristmill-cluster); clusters in different folders do not
know of one another. The cache is $GRISTMILL_CLUSTER_CACHE (~/.cache/gristmill/cluster).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import bringup
import cache
import components
import images
import keeper
import machine
import namespaces
import plan as plans
import programs
from plan import NODE_GRACE_S, Level, Plan
from waiting import run, wait_for


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", metavar="VERB", choices=[*VERBS_OF_MACHINE, *VERBS_OF_CLUSTER])
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    rest = options.rest[1:] if options.rest[:1] == ["--"] else options.rest
    try:
        do(options.verb, rest)
    except (RuntimeError, TimeoutError, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"cluster: {' '.join(map(str, error.cmd))} ended with {error.returncode}",
            file=sys.stderr,
        )
        return 1
    return 0


def do(verb: str, rest: list[str]) -> None:
    folder = plans.default_folder()
    if verb in VERBS_OF_MACHINE:
        VERBS_OF_MACHINE[verb](folder, rest)
        return
    plan = running(folder)
    if verb in ("start", "stop", "kill", "signal"):
        handle(plan, verb, rest)
    elif verb == "load":
        load(plan)
    else:
        become(plan, verb, rest)


def build(_folder: Path, _rest: Sequence[str]) -> None:
    programs.install_packages()
    folder = programs.built()
    archives = images.built(folder)
    cache.prune()
    print(f"programs {folder}\nimages {' '.join(map(str, archives))}")


def is_built(_folder: Path, _rest: Sequence[str]) -> None:
    if programs.missing_packages() or programs.ready() is None:
        raise RuntimeError("the cluster is not built; run `make cluster-build`")


def up(folder: Path, rest: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="cluster.py up")
    parser.add_argument("--level", choices=("control", "node"), default="node")
    parser.add_argument(
        "--node-grace", type=int, help="seconds without a heartbeat until a node is NotReady"
    )
    parser.add_argument("--gpus", type=int, default=8, help="fake GPUs of the node")
    options = parser.parse_args(rest)
    if os.geteuid() != 0:
        raise RuntimeError("the cluster needs root: it makes namespaces, mounts and cgroups")
    level: Level = options.level
    if (
        machine.init_pid(folder)
        and plans.load(folder).level == level
        and (folder / "ready").exists()
    ):
        print(f"a cluster of level {level} is up in {folder}")
        return
    programs.install_packages()
    binaries = programs.built()
    on_node = level == "node"
    machine.up(
        Plan(
            folder=folder,
            level=level,
            bin=binaries,
            images=images.built(binaries) if on_node else (),
            sites=images.package_folders() if on_node else (),
            node_grace_s=options.node_grace or NODE_GRACE_S[level],
            gpus=options.gpus,
        )
    )


def bring_up(folder: Path, _rest: Sequence[str]) -> None:
    """Inside: start everything and leave `ready` or `failed` for the process that waits outside."""
    plan = plans.load(folder)
    try:
        bringup.bring_up(plan)
    except BaseException:
        (plan.folder / "failed").touch()
        raise
    (plan.folder / "ready").touch()


def init(folder: Path, _rest: Sequence[str]) -> None:
    """Process 1 of the cluster's namespaces."""
    plan = plans.load(folder)
    namespaces.prepare(plan)
    keeper.keep(plan)


def down(folder: Path, _rest: Sequence[str]) -> None:
    machine.down(folder)


def running(folder: Path) -> Plan:
    if machine.init_pid(folder) is None:
        raise RuntimeError(f"no cluster is up in {folder}; start one with `make cluster`")
    return plans.load(folder)


def status(folder: Path, _rest: Sequence[str]) -> None:
    plan = running(folder)
    found = machine.processes(folder)
    for process in found:
        print(f"{process.pid:>8} {process.resident_kib / 1024:8.1f} MiB  {process.name}")
    total = sum(process.resident_kib for process in found)
    print(f"{'':>8} {total / 1024:8.1f} MiB  in all, level {plan.level}, folder {folder}")
    print(f"KUBECONFIG={plan.kubeconfig('admin')}")


def load(plan: Plan) -> None:
    """Import into the node's containerd what changed in our code since the start."""
    archives = images.built(plan.bin)
    for archive in archives:
        if archive not in plan.images:
            run(
                *machine.enter(
                    plan.folder,
                    sys.executable,
                    str(plans.HERE / "loading.py"),
                    str(archive),
                    everything=True,
                )
            )
    for reference, pinned in images.pinned_references(archives).items():
        print(f"{reference}  {pinned}")


def handle(plan: Plan, verb: str, rest: list[str]) -> None:
    """Start, stop or signal one component."""
    if not rest:
        raise ValueError(f"`{verb}` needs the name of a component")
    name, *more = rest
    pid_file = plan.folder / "run" / f"{name}.pid"
    if name not in components.commands(plan):
        raise ValueError(f"level {plan.level} has no component {name!r}")
    if verb == "start":
        bringup.want(plan, name, arguments=tuple(more[1:] if more[:1] == ["--"] else more))
        wait_for(f"{name} to start", pid_file.exists, 10)
    elif verb == "stop":
        (plan.folder / "want" / name).unlink(missing_ok=True)
        wait_for(f"{name} to end", lambda: not pid_file.exists(), 20)
    else:
        signal_name = "KILL" if verb == "kill" else more[0]
        if not pid_file.exists():
            raise RuntimeError(f"{name} does not run")
        pid = pid_file.read_text()
        run(*machine.enter(plan.folder, "kill", "-s", signal_name, pid, everything=True))
        if (
            verb == "kill"
        ):  # a caller that asks for its health next must not meet the one that is dying
            wait_for(
                f"{name} to end", lambda: not pid_file.exists() or pid_file.read_text() != pid, 10
            )


def become(plan: Plan, verb: str, rest: list[str]) -> None:
    """Replace this process by a command in the cluster's network."""
    os.environ["KUBECONFIG"] = str(plan.kubeconfig("admin"))
    os.environ["GRISTMILL_CLUSTER_DIR"] = str(plan.folder)
    os.environ["PATH"] = f"{plan.bin}:{os.environ['PATH']}:/usr/sbin:/sbin"
    argv = {"exec": rest, "ctr": ["ctr", "-n", "k8s.io", *rest]}.get(verb, [verb, *rest])
    command = machine.enter(plan.folder, *argv, everything=verb == "ctr")
    os.execvp(command[0], command)


VERBS_OF_CLUSTER = ("exec", "kubectl", "helm", "ctr", "load", "start", "stop", "kill", "signal")
VERBS_OF_MACHINE: dict[str, Callable[[Path, Sequence[str]], None]] = {
    "build": build,
    "is-built": is_built,
    "up": up,
    "down": down,
    "status": status,
    "init": init,
    "bring-up": bring_up,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
