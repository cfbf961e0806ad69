"""When a worker's end is tried again, after how long, and when it is given up. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

from gristmill_contracts.session import FailurePolicy

JITTER_SHARE: Final = 0.2
PROGRESS_RESETS_AFTER_S: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Start again after this long."""

    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The session has failed."""

    reason: Literal["MaxRestartsExceeded", "FatalExit"]
    message: str


def backoff_s(policy: FailurePolicy, restarts: int, jitter: float = 0.0) -> float:
    """Pause before restart number `restarts` (1 = first): it doubles up to its maximum.

    jitter: -1 to 1, drawn by the caller; it moves the pause by at most JITTER_SHARE.
    """
    doubled: float = policy.backoff_seconds * 2.0 ** min(max(restarts, 1) - 1, 30)
    return min(doubled, float(policy.backoff_max_seconds)) * (1 + JITTER_SHARE * jitter)


def judge(
    policy: FailurePolicy, failures: int, exit_code: int | None, message: str = ""
) -> Retry | GiveUp | None:
    """What `failures` ends without progress between them lead to. None = there was none."""
    if failures == 0:
        return None
    why = f": {message}" if message else ""
    if exit_code is not None and exit_code in policy.fatal_exit_codes:
        return GiveUp(
            reason="FatalExit",
            message=f"the worker ended with exit code {exit_code}, which failurePolicy names as fatal{why}",
        )
    if failures > policy.max_restarts:
        return GiveUp(
            reason="MaxRestartsExceeded",
            message=f"the worker ended {failures} times without progress in between, last with exit code "
            f"{exit_code}; failurePolicy.maxRestarts is {policy.max_restarts}{why}",
        )
    return Retry(after_s=backoff_s(policy, failures))
