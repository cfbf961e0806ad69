"""The gateway as a process: help, settings, start, and an orderly end."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_S_MAX = 30


def run(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRISTMILL")}
    return subprocess.Popen(
        [sys.executable, "-m", "gristmill_gateway", *arguments],
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_help_names_every_setting() -> None:
    process = run(["--help"])
    out, err = process.communicate(timeout=START_S_MAX)
    assert (process.returncode, err) == (0, "")
    for name in ("HOST", "PORT", "STORE_PATH", "LEDGER_URL", "OPERATION_KEY_FILE"):
        assert f"GRISTMILL_GATEWAY_{name} " in out


def test_a_misspelt_or_wrong_setting_ends_the_start() -> None:
    for environment, text in (
        ({"GRISTMILL_GATEWAY_PROT": "1"}, "GRISTMILL_GATEWAY_PROT"),
        ({"GRISTMILL_GATEWAY_PORT": "x"}, "port"),
    ):
        process = run([], **environment)
        _, err = process.communicate(timeout=START_S_MAX)
        assert process.returncode != 0
        assert text in err


def test_it_serves_and_ends_with_0_on_sigterm_and_keeps_its_key(tmp_path: Path) -> None:
    key = tmp_path / "operation.key"
    kept = b""
    for _ in range(2):
        process = run(
            [],
            GRISTMILL_GATEWAY_PORT="0",
            GRISTMILL_GATEWAY_STORE_PATH=str(tmp_path / "store.sqlite3"),
            GRISTMILL_GATEWAY_ARTIFACTS_DIR=str(tmp_path / "artifacts"),
            GRISTMILL_GATEWAY_OPERATION_KEY_FILE=str(key),
            GRISTMILL_GATEWAY_LEDGER_URL="http://127.0.0.1:9",
        )
        assert process.stderr is not None
        url = ""
        deadline = time.monotonic() + START_S_MAX
        while not url and time.monotonic() < deadline:
            line = json.loads(process.stderr.readline())
            assert line["process"] == "gateway"
            _, found, rest = line["event"].partition("http://")
            url = found + rest.split()[0] if found else ""
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            assert json.loads(answer.read()) == {"ready": True, "missing": ["ledger"]}
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=START_S_MAX)
        assert process.returncode == 0, err
        assert "gateway_stopped" in err
        assert key.stat().st_mode & 0o777 == 0o600
        assert kept in (b"", key.read_bytes())
        kept = key.read_bytes()
