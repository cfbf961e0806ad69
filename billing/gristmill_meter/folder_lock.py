"""One meter for a data folder: two would both write the logs, and neither could be trusted."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from gristmill_contracts.errors import UnavailableError

RETRY_S: Final = 0.05


def lock_folder(folder: Path, wait_s: float) -> int:
    """Take the folder's lock for as long as this process lives; the kernel frees it at any death.

    Waits for a predecessor that is still draining. Raises UnavailableError once `wait_s` is over.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise UnavailableError(
                    f"another meter holds {folder}; stop it, or set GRISTMILL_METER_DATA_DIR to another folder"
                ) from None
            time.sleep(RETRY_S)
        else:
            return descriptor
