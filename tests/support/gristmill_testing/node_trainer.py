"""The official SDK training in a thread, while the test breaks or changes the cluster around it.

The client is unmodified: what it retries is its own affair, and any error that it raises ends the run.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import sagemaker.train.training_session as sdk

from gristmill_testing.cluster import eventually
from gristmill_testing.crash_campaign import digest, rows_of
from gristmill_testing.sdk_loop import batch

DATUMS, LENGTH = 8, 32
PAUSE_S = 0.2
"""Between two steps, so that a run of minutes can be repeated in one."""
STEP_S = 180.0
"""How long the test waits for one more operation, on a machine with little to spare."""


@dataclass(slots=True)
class Trainer:
    """Pipelined steps on batches that depend on the number of the step alone."""

    client: sdk.TrainingClient
    steps_max: int = 10_000
    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    tokens: int = 0
    results: list[tuple[float, float]] = field(default_factory=list)
    """When each operation was sent and when the client had its result, by time.monotonic."""
    error: BaseException | None = None
    _leave: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 2 * STEP_S) -> None:
        """End after the step that runs."""
        self._leave.set()
        self.join(seconds)

    def join(self, seconds: float = 2 * STEP_S) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            assert not self._thread.is_alive(), f"stuck in step {len(self.losses)}"
        self.check()

    def check(self) -> None:
        """The error that the client raised, if it did."""
        if self.error is not None:
            raise AssertionError(f"the client saw {self.error!r}") from self.error

    def wait_after(self, moment: float, seconds: float = STEP_S) -> float:
        """When the first operation that was sent after this moment was completed."""

        def probe() -> float | None:
            self.check()
            return next((done for sent, done in self.results if sent > moment), None)

        found: float = eventually("one more operation is completed", probe, seconds, every=0.05)
        return found

    def wait_steps(self, count: int, seconds: float = STEP_S) -> None:
        """Until so many more steps are done."""
        wanted = len(self.losses) + count

        def probe() -> bool:
            self.check()
            return len(self.losses) >= wanted

        eventually(f"step {wanted} is done", probe, seconds, every=0.05)

    def longest_pause(self, since: float) -> float:
        """Seconds between two results, the first of them the last before `since`."""
        done = [done for _, done in self.results]
        moments = [each for each in done if each <= since][-1:]
        moments += [each for each in done if each > since]
        return max((b - a for a, b in itertools.pairwise(moments)), default=0.0)

    def _run(self) -> None:
        try:
            while not self._leave.is_set() and len(self.losses) < self.steps_max:
                self._step(len(self.losses))
                self._leave.wait(PAUSE_S)
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's thread
            self.error = error

    def _step(self, number: int) -> None:
        rows = rows_of(number, DATUMS, LENGTH)
        sent = time.monotonic()
        passed = self.client.forward_backward(batch(rows))
        stepped = self.client.optim_step(sdk.AdamParams(learning_rate=1e-3))
        result = passed.result()
        self.results.append((sent, time.monotonic()))
        stepped.result()
        self.results.append((sent, time.monotonic()))
        self.tokens += sum(map(len, rows))
        self.digests.append(digest(result.loss_fn_outputs))
        self.losses.append(result.metrics["actor/pg_loss"])


@contextmanager
def training(client: sdk.TrainingClient) -> Iterator[Trainer]:
    """A trainer that has done its first steps; it is stopped at the end, whatever happens."""
    trainer = Trainer(client)
    trainer.start()
    try:
        trainer.wait_steps(2)
        yield trainer
    finally:
        trainer._leave.set()


def train(client: sdk.TrainingClient, steps: int) -> Trainer:
    """An undisturbed run."""
    trainer = Trainer(client, steps_max=steps)
    trainer.start()
    trainer.join(seconds=10 * STEP_S)
    return trainer
