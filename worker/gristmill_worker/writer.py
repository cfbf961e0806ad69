"""Writing behind the engine's back: one piece after another, each on a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from gristmill_worker.problems import translated

T = TypeVar("T")


class Writer:
    """Used by one thread. What is given to `write` must be nobody else's to change."""

    def __init__(self) -> None:
        self.last: threading.Thread | None = None

    def write(self, work: Callable[[], T]) -> "Future[T]":
        """Start once everything given before has ended, well or not."""
        done: Future[T] = Future()
        before = self.last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                done.set_exception(translated(error))
            except BaseException as error:  # noqa: BLE001 - the same, but not ours to name
                done.set_exception(error)

        # A daemon: a disk that hangs must not keep the process from ending in its grace.
        self.last = threading.Thread(target=run, name="snapshot", daemon=True)
        self.last.start()
        return done

    def wait(self) -> None:
        """Until everything given so far has ended, well or not."""
        if self.last is not None:
            self.last.join()
            self.last = None
