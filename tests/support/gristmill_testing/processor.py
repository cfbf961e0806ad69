"""Processor time, for benchmarks: of one process, or of everything that runs in the cluster's network."""

import os
from collections import Counter
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
HERE = "this process"


def cpu_s(pid: int) -> float:
    """What a process has used so far: a busy machine distorts it least."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def processor_seconds() -> Counter[str]:
    """Name of a program -> seconds of all its processes so far. The caller is in the cluster's network."""
    network = os.readlink("/proc/thread-self/ns/net")
    found: Counter[str] = Counter()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns/net") != network:
                continue
            fields = (folder / "stat").read_text().rsplit(") ", 1)[1].split()
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has ended meanwhile
        name = HERE if folder.name == str(os.getpid()) else _name(words)
        found[name] += (int(fields[11]) + int(fields[12])) / TICKS  # type: ignore[assignment]
    return found


def _name(words: list[str]) -> str:
    """Of a Python program, the module or script; a kernel thread has no words."""
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program or "?"
    arguments = [each for each in words[1:] if each and each != "-m" and not each.startswith("-")]
    return Path(arguments[0]).name if arguments else program
