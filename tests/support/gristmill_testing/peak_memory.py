"""The most bytes that tensors held at once while something ran. Counted, so that no other process changes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_rss_bytes(pid: int) -> int:
    """The most that a process had resident since it was started, libraries included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} tells no VmHWM")


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int:
    """Beyond what was held before. Of the device's allocator: kernels' own workspaces are not in it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    inner: Any = profiled.profiler
    changes = [
        (event.start_ns(), event.nbytes())
        for event in inner.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        held += change
        most = max(most, held)
    return most
