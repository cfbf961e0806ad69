"""Check what the demo promised: the loss fell, the reward rose, and every token is in the ledger once.

    python scripts/demo_checks.py SFT_SUMMARY RL_SUMMARY

Reads what the recipes counted on their side and compares it, to the token, with `gristmill usage`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LEDGER_WAIT_S = 30.0
TOKEN_TYPES = ("train", "prefill", "cached_prefill", "sample")


def usage_rows() -> dict[str, dict[str, Any]]:
    """The ledger's rows by session name."""
    command = ["gristmill", "usage", "--group-by", "session", "--output", "json"]
    answer = subprocess.run(command, capture_output=True, check=True, text=True)  # noqa: S603
    return {row["session_name"]: row for row in json.loads(answer.stdout)["rows"]}


def billed(session: str, counted: dict[str, int]) -> dict[str, int]:
    """Tokens of the session in the ledger, waiting for it to have heard of all that was counted."""
    deadline = time.monotonic() + LEDGER_WAIT_S
    while True:
        row = usage_rows().get(session, {})
        tokens = {name: int(row.get(name) or 0) for name in TOKEN_TYPES}
        if tokens == counted or time.monotonic() > deadline:
            return tokens
        time.sleep(0.5)


def verdict(passed: bool, text: str) -> bool:
    print(f"{'ok    ' if passed else 'FAILED'} {text}")
    return passed


def check_tokens(summary: dict[str, Any]) -> bool:
    counted = {name: summary["tokens"].get(name, 0) for name in TOKEN_TYPES}
    tokens = billed(summary["session"], counted)
    text = f"{summary['session']}: the client counted {counted}, the ledger {tokens}"
    return verdict(tokens == counted, text)


def main() -> int:
    sft, rl = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    before, after = sft["held_out"]
    rewards = rl["rewards"]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    passed = [
        verdict(after < before, f"the loss on held-out text fell from {before:.3f} to {after:.3f}"),
        verdict(last >= first + 0.1, f"the mean reward rose from {first:.3f} to {last:.3f}"),
        check_tokens(sft),
        check_tokens(rl),
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
