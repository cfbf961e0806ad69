"""Inside the cluster's namespaces: its own /sys and state folders, its network, its firewall rules."""

from __future__ import annotations

import os
from pathlib import Path

from configuration import HOST_FOLDERS
from plan import FAKE_POD_CIDR, NODE, NODE_IP, POD_CIDR, POLICY_QUEUE, WORLD_IP, Plan
from waiting import run, wait_for


def prepare(plan: Plan) -> None:
    """Mounts, host name and loopback. Everything here goes with the namespaces."""
    run(
        "mount", "--make-rshared", "/"
    )  # the kubelet needs it; a peer group of this namespace alone
    if plan.level == "node":
        mount_sys(plan)
        bind_folders(plan)
        mount_sites(plan)
    run("hostname", NODE)
    run("ip", "link", "set", "lo", "up")
    run("ip", "route", "add", "local", FAKE_POD_CIDR, "dev", "lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def mount_sys(plan: Plan) -> None:
    """A fresh sysfs shows this network's interfaces, but hides the cgroups: bind them back."""
    cgroups = plan.folder / "mnt/cgroup"
    cgroups.mkdir(parents=True, exist_ok=True)
    run("mount", "--rbind", "/sys/fs/cgroup", str(cgroups))
    run("mount", "-t", "sysfs", "sysfs", "/sys")
    run("mount", "--rbind", str(cgroups), "/sys/fs/cgroup")


def bind_folders(plan: Plan) -> None:
    for source, target in HOST_FOLDERS.items():
        Path(target).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", str(plan.folder / source), target)
        run("mount", "--make-rshared", target)


def mount_sites(plan: Plan) -> None:
    """One read-only folder that shows the Python packages of this machine, torch among them."""
    site = plan.folder / "site-packages"
    site.mkdir(exist_ok=True)
    if len(plan.sites) > 1:
        lower = ":".join(str(folder) for folder in plan.sites)
        run("mount", "-t", "overlay", "overlay", "-o", f"ro,lowerdir={lower}", str(site))
    elif plan.sites:
        run("mount", "--bind", str(plan.sites[0]), str(site))
        run("mount", "-o", "remount,bind,ro", str(site))


def join_nothing() -> None:
    """The node's address on a bridge without ports, for a cluster that has no node."""
    run("ip", "link", "add", "node0", "type", "bridge")
    take_address()


def join_world(plan: Plan) -> None:
    """A veth pair between the node and the world, and the default route through it."""
    pid_file = plan.folder / "run/world.pid"
    wait_for("the world's process", pid_file.exists)
    pid = pid_file.read_text()
    ours = os.readlink("/proc/1/ns/net")
    # unshare(1) becomes the program, so this PID is in its new namespace a moment after it exists.
    wait_for("the world's network", lambda: os.readlink(f"/proc/{pid}/ns/net") != ours)
    run("ip", "link", "add", "node0", "type", "veth", "peer", "name", "world0", "netns", pid)
    take_address()
    run("ip", "route", "add", "default", "via", WORLD_IP)


def take_address() -> None:
    run("ip", "address", "add", f"{NODE_IP}/24", "dev", "node0")
    run("ip", "link", "set", "node0", "up")


def queue_new_connections() -> None:
    """Send the first packet of every pod's connection to the policy agent; without one, none passes.

    What the node itself sends to pods, the kubelet's probes for one, leaves by OUTPUT and is never queued.
    """
    queue = ("-m", "conntrack", "--ctstate", "NEW", "-j", "NFQUEUE", "--queue-num", POLICY_QUEUE)
    for chain, side in (("FORWARD", "-s"), ("FORWARD", "-d"), ("INPUT", "-s")):
        run("iptables", "-w", "-A", chain, side, POD_CIDR, *queue)
