"""One thread, one seed, one schedule: an event loop whose time is virtual, and processes that can be killed.

Nothing sleeps. When nothing is ready, the clock jumps to the next timer. A process is a context variable
that every task of it inherits; the loop runs no callback of a dead one, so that a kill takes effect between
any two steps, without a `finally` or a handler of errors, as kill -9 does.
"""

import asyncio
import contextvars
import gc
import heapq
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

EPOCH_S = 1_790_000_000.0
"""Wall-clock time at virtual second 0."""


class Killed(BaseException):
    """The process dies inside a blocking call. No handler of errors may catch it."""


class Hung(BaseException):
    """A blocking call that never returns, as of a disk behind a network that is gone."""


class BrokenOffError(Exception):
    """A promise was broken: what comes after would only hide it."""


class StuckError(AssertionError):
    """The run did not end: nothing is left to happen, or far too much happened."""


class Process:
    """What is killed together. `steps_left`: it dies before its next callback but so many."""

    def __init__(self, loop: "SimLoop", name: str, host: str) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.dead = False
        self.steps_left: int | None = None
        self.on_death: list[Callable[[], None]] = []
        self._context = NOBODY.copy()
        self._context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> "asyncio.Task[Any]":
        task = self.loop.create_task(work, name=name or self.name, context=self._context.copy())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            trail = "".join(traceback.format_exception(error)[-3:])
            self.loop.errors.append(f"{task.get_name()} of {self.name}: {trail}")

    def run_later(self, delay_s: float, work: Callable[..., object], *args: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_later(delay_s, work, *args, context=self._context)

    def kill(self) -> None:
        if self.dead:
            return
        self.dead = True
        self.loop.note("killed", self.name)
        for tell in self.on_death:
            tell()


PROCESS: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("process", default=None)

NOBODY = contextvars.copy_context()
"""Of what no process does: the network, and whoever kills."""


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """Hashed by order of birth: a set of tasks is then walked in the same order in every run."""

    def __init__(self, loop: "SimLoop", coro: Any, **more: Any) -> None:
        loop.births += 1
        self.birth = loop.births
        super().__init__(coro, loop=loop, **more)
        self._log_destroy_pending = False
        loop.tasks.append(self)

    def __hash__(self) -> int:
        return self.birth

    def __eq__(self, other: object) -> bool:
        return self is other


class Moment(float):
    """When a timer is due. Heaps compare it as a number: a timer itself is compared by Python, at length."""

    __slots__ = ("timer",)
    timer: asyncio.TimerHandle


class SimLoop(asyncio.BaseEventLoop):
    """`note` records what happens; the digest of all notes is the run's trace."""

    STEPS_MAX: ClassVar[int] = 2_000_000

    def __init__(self, seed: int, note: Callable[..., None]) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.note = note
        self.now = 0.0
        self.disk_s = 0.004
        """Longest time of a blocking call."""
        self.births = 0
        self.steps = 0
        self.tasks: list[SimTask] = []
        self.errors: list[str] = []
        self.broken = False
        """A promise was broken: the run ends before its next step."""
        self._busy_until: dict[Any, float] = {}
        """By executor, which is kept: another one at the address of a dead one's must not wait for it."""
        self.set_task_factory(SimTask)  # type: ignore[arg-type]
        self.set_exception_handler(self._unexpected)

    # --- what asyncio asks of a loop -------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, but for the heap: see `Moment`."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        moment = Moment(when)
        moment.timer = timer
        heapq.heappush(self._scheduled, moment)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        pass

    def _unexpected(self, _loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.errors.append(f"{context.get('message')}: {error!r}")

    def _run_once(self) -> None:
        if self.broken:
            self.broken = False
            raise BrokenOffError
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready:
            self._jump(ready, scheduled)
        handle = ready.popleft()
        if handle._cancelled:
            return
        process = handle._context.get(PROCESS)
        if process is not None:
            if process.dead:
                return
            if process.steps_left is not None:
                if process.steps_left <= 0:
                    process.kill()
                    return
                process.steps_left -= 1
        self.steps += 1
        if self.steps > self.STEPS_MAX:
            raise StuckError(f"more than {self.STEPS_MAX} steps")
        handle._run()

    def _jump(self, ready: Any, scheduled: Any) -> None:
        """To the next timer. Timers of the dead and of the cancelled do not count."""
        while scheduled:
            timer = heapq.heappop(scheduled).timer
            timer._scheduled = False
            owner = timer._context.get(PROCESS)
            if timer._cancelled or (owner is not None and owner.dead):
                continue
            self.now = max(self.now, timer._when)
            ready.append(timer)
            return
        raise StuckError("nothing is left to happen")

    # --- threads ---------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """The call happens at one later moment, and its answer comes at a still later one.

        Calls of one executor keep their order: it may be a single thread.
        """
        future = self.create_future()
        start = self.now + self.rng.random() * self.disk_s / 2
        if executor is not None:
            start = max(start, self._busy_until.get(executor, 0.0))
            self._busy_until[executor] = start
        self.call_at(start, self._blocking, future, func, args)
        return future

    def _blocking(self, future: Any, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if future.cancelled():
            return
        process = PROCESS.get()
        try:
            answer = func(*args)
        except Killed:
            if process is not None:
                process.kill()
            return
        except Hung:
            return
        except StopIteration:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.call_later(self.rng.random() * self.disk_s, _fail, future, error)
            return
        self.call_later(self.rng.random() * self.disk_s, _finish, future, answer)


def _finish(future: Any, answer: Any) -> None:
    if not future.done():
        future.set_result(answer)


def _fail(future: Any, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


@contextmanager
def virtual_time(loop: SimLoop) -> Iterator[None]:
    """Every clock of the `time` module follows the loop for the length of the block."""
    real = {
        name: getattr(time, name)
        for name in ("time", "time_ns", "monotonic", "clock_gettime", "clock_gettime_ns")
    }
    sleep = time.sleep
    time.time = lambda: EPOCH_S + loop.now
    time.time_ns = lambda: int((EPOCH_S + loop.now) * 1e9)
    time.monotonic = lambda: loop.now
    time.clock_gettime = lambda _clock: loop.now  # type: ignore[misc,assignment]
    time.clock_gettime_ns = lambda _clock: int(loop.now * 1e9)  # type: ignore[misc,assignment]
    time.sleep = lambda _seconds: None
    try:
        yield
    finally:
        for name, clock in real.items():
            setattr(time, name, clock)
        time.sleep = sleep


@contextmanager
def running(loop: SimLoop) -> Iterator[None]:
    """Clocks follow the loop; what the dead left behind is buried silently at the end."""
    collects = gc.isenabled()
    gc.disable()
    gc.freeze()  # What is loaded stays: looking through it again and again takes longer than the run.
    hook = sys.unraisablehook
    try:
        with virtual_time(loop):
            yield
    finally:
        sys.unraisablehook = lambda _unraisable: None
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Of coroutines that their process did not live to await.
            loop._ready.clear()  # type: ignore[attr-defined]
            loop._scheduled.clear()  # type: ignore[attr-defined]
            loop.tasks.clear()
            loop.close()
            gc.collect()
        sys.unraisablehook = hook
        if collects:
            gc.enable()
