"""The cluster's programs: Debian's packages, and one Go binary that is all the rest.

python3 programs.py    install and build them; it needs no package but the standard library
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import cache
from plan import HERE

KUBERNETES = "1.37.2"
GO_MINIMUM = (1, 26)
TOOL = HERE / "tool"
TELL_EVERY_S = 15
# Program -> Debian package. Kubernetes needs most of them, the control program the rest.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ipset": "ipset",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "socat": "socat",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
BUILD_ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-trimpath -buildvcs=false", "GOWORK": "off"}


def missing_packages() -> list[str]:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return sorted(
        {package for name, package in PACKAGES.items() if not shutil.which(name, path=path)}
    )


def install_packages() -> None:
    """apt-get what is missing. RuntimeError where that needs a root that we are not."""
    missing = missing_packages()
    if not missing:
        return
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise RuntimeError(f"the cluster needs {', '.join(missing)}; run: sudo {' '.join(install)}")
    # No service may start: containerd belongs into the cluster's namespaces alone.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    print(f"installing {', '.join(missing)}", flush=True)
    for command in (["apt-get", "update", "-q"], install):
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def go_command() -> str:
    """The Go toolchain. RuntimeError with what to do where there is none that is new enough."""
    found = shutil.which("go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin")
    wanted = ".".join(map(str, GO_MINIMUM))
    advice = f"install Go {wanted} or newer (https://go.dev/dl) so that `go` is in the PATH or in /usr/local/go/bin"
    if found is None:
        raise RuntimeError(f"no Go toolchain was found; {advice}")
    output = subprocess.run(
        [found, "env", "GOVERSION"], check=True, capture_output=True, text=True
    ).stdout
    if tuple(int(part) for part in output.strip().removeprefix("go").split(".")[:2]) < GO_MINIMUM:
        raise RuntimeError(f"{found} is {output.strip()}; {advice}")
    return found


def sources() -> list[Path]:
    return [TOOL / "go.mod", TOOL / "go.sum", *TOOL.rglob("*.go")]


def key() -> str:
    return cache.key_of(sources(), KUBERNETES, linker_flags())


def linker_flags() -> str:
    """What a release build stamps into the programs: `kubectl version` and version checks read it."""
    major, minor, _ = KUBERNETES.split(".")
    values = {
        "gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean",
        "gitCommit": "0" * 40, "buildDate": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamps = [
        f"-X {package}.{name}={value}" for package in packages for name, value in values.items()
    ]
    return " ".join(["-s -w", *stamps])


def ready() -> Path | None:
    """The folder of the programs if they are built; None if they are not."""
    folder = cache.root() / f"bin-{key()}"
    return folder if folder.exists() else None


def built() -> Path:
    """The folder of the programs, built first where they are not: about ten minutes on two cores."""
    return cache.made("bin", key(), build)


def build(folder: Path) -> None:
    go = go_command()
    begin = time.monotonic()
    print(
        "building Kubernetes and its helpers: about 10 minutes the first time on 2 cores",
        flush=True,
    )
    environment = {**os.environ, **BUILD_ENVIRONMENT}
    subprocess.run([go, "mod", "download"], cwd=TOOL, env=environment, check=True)
    print(f"{clock(begin)}  modules are here", flush=True)
    listed = [go, "list", "-deps", "."]
    packages = subprocess.run(
        listed, cwd=TOOL, env=environment, check=True, capture_output=True, text=True
    )
    compile_all(go, folder, environment, total=len(packages.stdout.splitlines()), begin=begin)
    names = subprocess.run(
        [folder / "gm-kube", "--names"], check=True, capture_output=True, text=True
    ).stdout
    for name in names.split():
        (folder / name).symlink_to("gm-kube")
    print(f"{clock(begin)}  done: {', '.join(names.split())}", flush=True)


def compile_all(
    go: str, folder: Path, environment: dict[str, str], *, total: int, begin: float
) -> None:
    """Run the compiler and tell how far it is; what it has compiled before it does not list again."""
    command = [go, "build", "-v", "-ldflags", linker_flags(), "-o", str(folder / "gm-kube"), "."]
    process = subprocess.Popen(
        command, cwd=TOOL, env=environment, text=True, stderr=subprocess.PIPE
    )
    progress = Progress(total=total, begin=begin)
    teller = threading.Thread(target=progress.tell_until_done, daemon=True)
    teller.start()
    if process.stderr is None:
        raise RuntimeError("the compiler has no output")
    complaints = progress.count(process.stderr)
    code = process.wait()
    progress.done.set()
    teller.join()
    if code:
        raise RuntimeError("go build failed:\n" + "".join(complaints))
    pause = [go, "build", "-ldflags", "-s -w", "-o", str(folder / "pause"), "./pause"]
    subprocess.run(pause, cwd=TOOL, env=environment, check=True)


class Progress:
    """How many packages were compiled, told every few seconds."""

    def __init__(self, *, total: int, begin: float) -> None:
        self.total, self.begin, self.compiled = total, begin, 0
        self.done = threading.Event()

    def count(self, lines: Iterable[str]) -> list[str]:
        """Read the compiler's list of packages to its end; returns the lines that are no package."""
        complaints = []
        for line in lines:
            if " " in line.strip() or line.startswith("#"):
                complaints.append(line)
            else:
                self.compiled += 1
        return complaints

    def tell_until_done(self) -> None:
        while not self.done.wait(TELL_EVERY_S):
            print(
                f"{clock(self.begin)}  {self.compiled} of at most {self.total} packages compiled",
                flush=True,
            )


def clock(begin: float) -> str:
    minutes, seconds = divmod(int(time.monotonic() - begin), 60)
    return f"{minutes:3d}:{seconds:02d}"


if __name__ == "__main__":
    install_packages()
    print(built())
