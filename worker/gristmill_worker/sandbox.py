"""Take network sockets away from this process, for good: it needs its unix socket alone.

A worker shares its pod's network with the meter, which may reach the ledger; network policies cannot
tell the two apart. A seccomp filter can: it needs no privilege, binds all threads and children, and
cannot be taken back, also not by code that a model or a library brings along.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from typing import Final

PR_SET_NO_NEW_PRIVS: Final = 38
SECCOMP_SET_MODE_FILTER: Final = 1
FILTER_ALL_THREADS: Final = 1

LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
AT_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
RETURN: Final = 0x06  # BPF_RET | BPF_K
ALLOW: Final = 0x7FFF0000
REFUSE: Final = 0x00050000 | errno.EACCES

NUMBER_AT: Final = 0
"""Offsets in struct seccomp_data: number, architecture, low half of the first argument."""
ARCHITECTURE_AT: Final = 4
FIRST_ARGUMENT_AT: Final = 16

AF_UNIX: Final = 1
X32_BIT: Final = 0x40000000
"""System calls from here on are the x32 table of x86-64: a second door to the same calls."""

# Audit architecture, and the numbers of socket, socketpair, io_uring_setup and seccomp.
ARCHITECTURES: Final = {
    "x86_64": (0xC000003E, 41, 53, 425, 317),
    "aarch64": (0xC00000B7, 198, 199, 425, 277),
}


class SandboxError(OSError):
    """The filter was not installed."""


def forbid_network() -> None:
    """From now on only unix sockets can be made; open ones stay. Raises SandboxError where it cannot be."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in ARCHITECTURES:
        raise SandboxError(errno.ENOSYS, f"no seccomp filter for {platform.system()} {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SandboxError(ctypes.get_errno(), "no_new_privs was refused")
    code = ctypes.create_string_buffer(program(machine))
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(code.raw[:-1]) // 8, ctypes.addressof(code))
    )
    seccomp = ARCHITECTURES[machine][4]
    if libc.syscall(seccomp, SECCOMP_SET_MODE_FILTER, FILTER_ALL_THREADS, header) != 0:
        raise SandboxError(ctypes.get_errno(), "the seccomp filter was refused")


def program(machine: str) -> bytes:
    """The filter as BPF instructions: refuse other architectures, io_uring and all but unix sockets.

    io_uring opens sockets without the system call `socket`.
    """
    architecture, socket, socketpair, io_uring, _seccomp = ARCHITECTURES[machine]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, REFUSE),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 6, 0, X32_BIT),
        (EQUAL, 5, 0, io_uring),
        (EQUAL, 1, 0, socket),
        (EQUAL, 0, 2, socketpair),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (EQUAL, 0, 1, AF_UNIX),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return _assemble(steps)


def _assemble(steps: Sequence[tuple[int, int, int, int]]) -> bytes:
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
