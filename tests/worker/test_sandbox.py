"""A worker gives up network sockets for good, and goes on with its unix socket."""

import subprocess
import sys
from textwrap import dedent

import pytest

from gristmill_worker import sandbox

PROBE = """
import errno, socket, subprocess, sys, threading
from gristmill_worker.sandbox import forbid_network

def families():
    found = []
    for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET"):
        try:
            kind = socket.SOCK_STREAM if name in ("AF_UNIX", "AF_INET", "AF_INET6") else socket.SOCK_RAW
            socket.socket(getattr(socket, name), kind).close()
            found.append(name)
        except OSError as error:
            assert error.errno == errno.EACCES, error
    return found

started = threading.Event(); go = threading.Event(); seen = []
def other():
    started.set(); go.wait(); seen.extend(families())
thread = threading.Thread(target=other); thread.start(); started.wait()
before = families()
forbid_network()
go.set(); thread.join()
socket.socketpair()[0].close()
child = subprocess.run([sys.executable, "-c", "import socket; socket.socket()"], capture_output=True)
print(before, families(), seen, child.returncode)
"""


def test_all_threads_and_children_lose_every_family_but_unix() -> None:
    done = subprocess.run(
        [sys.executable, "-c", dedent(PROBE)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    before, rest = done.stdout.strip().split("] ", 1)
    assert "AF_INET" in before
    assert rest == "['AF_UNIX'] ['AF_UNIX'] 1"


def test_the_filter_refuses_other_tables_of_system_calls() -> None:
    code = sandbox.program("x86_64")
    assert len(code) == 12 * 8
    with pytest.raises(KeyError):
        sandbox.program("riscv64")
