"""Bounded waits. Each names what it waited for when it gives up."""

from __future__ import annotations

import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable


def wait_for(
    what: str, holds: Callable[[], bool], seconds: float = 60, every: float = 0.05
) -> None:
    """TimeoutError after `seconds` in which `holds` was never true."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(every)


def answers(url: str) -> bool:
    """Whether the URL answers 200. Certificates are not checked: this asks for life, not for truth."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run(*argv: str, stdin: str | None = None) -> str:
    """What the command prints; CalledProcessError, with its errors on our stderr, when it fails."""
    return subprocess.run(argv, check=True, text=True, input=stdin, stdout=subprocess.PIPE).stdout


def succeeds(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
