"""How many CPUs the control group grants: more threads than that slow torch down by half."""

import math
import os
from pathlib import Path
from typing import Final

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


def quota_of_v2(text: str) -> float | None:
    """`cpu.max`: "<quota> <period>" or "max <period>" -> CPUs, None = no limit."""
    quota, period = text.split()[:2]
    return None if quota == "max" else int(quota) / int(period)


def quota_of_v1(quota: str, period: str) -> float | None:
    """`cpu.cfs_quota_us` (-1 = no limit) and `cpu.cfs_period_us` -> CPUs."""
    return None if int(quota) <= 0 else int(quota) / int(period)


def read_quota(root: Path = CGROUP_ROOT) -> float | None:
    """CPUs that the cgroup grants, by either version; None if it does not limit."""
    try:
        return quota_of_v2((root / "cpu.max").read_text())
    except (OSError, ValueError):
        pass
    for folder in (root / "cpu", root / "cpu,cpuacct", root):
        try:
            return quota_of_v1(
                (folder / "cpu.cfs_quota_us").read_text(),
                (folder / "cpu.cfs_period_us").read_text(),
            )
        except (OSError, ValueError):
            continue
    return None


def thread_count(wanted: int, root: Path = CGROUP_ROOT) -> int:
    """`wanted`, or (0) the CPUs this process may really use, at least 1."""
    if wanted > 0:
        return wanted
    available = len(os.sched_getaffinity(0))
    quota = read_quota(root)
    return max(1, available if quota is None else min(available, math.ceil(quota)))
