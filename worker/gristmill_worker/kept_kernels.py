"""Where compiled kernels stay for the next start: a folder of one kind of processor, private to its owner.

What lies there is run as code. It is never shared: a session's pod has it on the session's own volume.
"""

import hashlib
import logging
import os
import platform
import shutil
import stat
from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

FOLDER_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's own: a worker's image of whatever age knows it."""
FOLDERS_MAX: Final = 4
"""Kinds of processor, and versions of torch, that a volume has seen last."""
BYTES_MAX: Final = 256 * 2**20
"""A folder that grew beyond this begins anew; a model's kernels take 3 MB."""
CPU_FIELDS: Final = frozenset({
    "vendor_id", "cpu family", "model", "model name", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
})  # fmt: skip
"""Lines of /proc/cpuinfo that say what code a processor runs."""


def divide_folder(environment: MutableMapping[str, str] = os.environ) -> None:
    """Before torch is imported: where it was told to keep what it compiles, have this machine's kind apart.

    A folder that others may write is not used: torch then takes its own, below TMPDIR.
    """
    root = environment.get(FOLDER_VARIABLE)
    if not root:
        return
    try:
        folder = _prepared(Path(root))
    except OSError as error:
        log.warning("kernels_not_kept", extra={"error": str(error)})
        del environment[FOLDER_VARIABLE]
        return
    environment[FOLDER_VARIABLE] = str(folder)
    environment.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def kind(cpuinfo: str, torch_version: str) -> str:
    """Names what the code was made for: a volume moves between machines, and code for one may not run on
    another."""
    first, _, _ = cpuinfo.partition("\n\n")
    lines = [line for line in first.splitlines() if line.partition(":")[0].strip() in CPU_FIELDS]
    made_for = "\n".join([platform.machine(), torch_version, *lines])
    return hashlib.sha256(made_for.encode()).hexdigest()[:16]


def _prepared(root: Path) -> Path:
    """The folder of this machine, new or ours. Raises OSError where others may have written."""
    info = Path("/proc/cpuinfo")
    name = kind(info.read_text(encoding="utf-8") if info.exists() else "", version("torch"))
    make_private(root)
    folder = root / name
    if folder.is_dir() and _size(folder) > BYTES_MAX:
        shutil.rmtree(folder)
    make_private(folder)
    os.utime(folder)
    others = [each for each in root.iterdir() if each.name != name and each.is_dir()]
    others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    for old in others[FOLDERS_MAX - 1 :]:
        shutil.rmtree(old)
    return folder


def make_private(folder: Path) -> None:
    """New or ours. Raises OSError where others may have written: what lies there is run as code."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = folder.lstat()
    # The group may: a volume's files are given to the pod's group whenever it is mounted.
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & stat.S_IWOTH:
        raise PermissionError(
            f"{folder} is not a folder of this user alone; nothing is loaded from it: name another one"
        )


def _size(folder: Path) -> int:
    return sum(each.lstat().st_size for each in folder.rglob("*"))
