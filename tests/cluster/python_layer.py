"""The first layer of our images: the interpreter that runs this, its libraries, and busybox.

It is copied to /usr/local, whatever its own prefix is. Wheels load libraries that the interpreter does not
name, so those are added by name; without them `import numpy` fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import oci
from parts import GROUP, SYSTEM_USER, WORKER_USER

Fill = Callable[[Path], None]

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
MULTIARCH = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
LIBRARIES = Path("usr/lib") / MULTIARCH
LEFT_OUT = ("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages",
            "dist-packages", "config-3*")  # fmt: skip
FOR_WHEELS = (
    "libnss_dns.so.2", "libnss_files.so.2", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1",
    "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libz.so.1",
)  # fmt: skip
# For tests that look around in a pod; a user's image has a distribution's.
APPLETS = ("sh", "nc", "sleep", "cat", "ls", "id", "ps", "wget", "nslookup", "date", "kill", "env", "test", "touch",
           "stat", "mkdir", "rm", "head", "tail", "grep", "echo", "true")  # fmt: skip
PASSWD = f"""\
root:x:0:0:root:/root:/sbin/nologin
gristmill:x:{SYSTEM_USER}:{GROUP}:gristmill:/tmp:/sbin/nologin
worker:x:{WORKER_USER}:{GROUP}:worker:/tmp:/sbin/nologin
"""


def fill(stage: Path) -> None:
    """Write the whole file system of the layer below stage."""
    write_base(stage)
    interpreter = Path(sys.base_prefix) / "bin" / VERSION
    binaries = stage / "usr/local/bin"
    binaries.mkdir(parents=True)
    shutil.copy(interpreter, binaries / VERSION)
    for alias in ("python3", "python"):
        (binaries / alias).symlink_to(VERSION)
    library = Path("usr/local/lib") / VERSION
    standard = Path(sysconfig.get_path("stdlib"))
    oci.copy_tree(standard, stage / library, LEFT_OUT)
    (stage / library / "site-packages").mkdir()
    (stage / library / "dist-packages").symlink_to(
        "site-packages"
    )  # Debian's interpreter looks there
    compile_bytes(stage, library)
    copy_libraries(stage, [interpreter, *(standard / "lib-dynload").glob("*.so")])
    copy_busybox(stage)


def write_base(stage: Path) -> None:
    for folder in ("etc", "usr/bin", "usr/lib", "usr/lib64", "tmp", "proc", "sys", "dev"):
        (stage / folder).mkdir(parents=True)
    (stage / "tmp").chmod(0o1777)
    (stage / "etc/passwd").write_text(PASSWD)
    (stage / "etc/group").write_text(f"root:x:0:\ngristmill:x:{GROUP}:\n")
    (stage / "etc/nsswitch.conf").write_text("hosts: files dns\n")
    for link in ("lib", "lib64", "bin"):
        (stage / link).symlink_to(f"usr/{link}")


def copy_libraries(stage: Path, programs: Iterable[Path]) -> None:
    """Every shared library that the programs load, and the ones that wheels load."""
    (stage / LIBRARIES).mkdir(parents=True)
    wanted = needed(programs)
    wanted |= {path for name in FOR_WHEELS if (path := Path("/") / LIBRARIES / name).exists()}
    for library in sorted(wanted):
        folder = Path("usr/lib64") if library.name.startswith("ld-linux") else LIBRARIES
        shutil.copy(library.resolve(), stage / folder / library.name)


def needed(programs: Iterable[Path]) -> set[Path]:
    found: set[Path] = set()
    for program in programs:
        listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
        found |= {Path(word) for word in listed.stdout.split() if word.startswith("/")}
    return {path for path in found if path.is_file()}


def copy_busybox(stage: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("no busybox on this machine; run: apt-get install busybox-static")
    shutil.copy(busybox, stage / "usr/bin/busybox")
    for applet in APPLETS:
        (stage / "usr/bin" / applet).symlink_to("busybox")


def compile_bytes(stage: Path, folder: Path) -> None:
    """Byte code that Python does not check again: a layer keeps no times, and a read-only root no new files."""
    options = [
        "-q",
        "-f",
        "-j",
        "2",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        str(stage),
        "-p",
        "/",
    ]
    command = [sys.executable, "-m", "compileall", *options, str(stage / folder)]
    # Templates that are no Python and code of other versions do not compile; what matters is imported by tests.
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
