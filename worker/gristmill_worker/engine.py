"""The engine thread: loads the model, then runs work one piece at a time, first come first served."""

import contextlib
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

import torch

from gristmill_contracts.errors import OverloadedError, UnavailableError
from gristmill_contracts.http import WorkerStatus
from gristmill_worker.base_model import BaseModel
from gristmill_worker.checkpoints import Checkpoints
from gristmill_worker.counters import WorkerMetrics
from gristmill_worker.cpu_quota import thread_count
from gristmill_worker.disk import HostDisk
from gristmill_worker.fingerprint import fingerprint
from gristmill_worker.loading import load_base_model
from gristmill_worker.orders import Finish
from gristmill_worker.problems import translated
from gristmill_worker.runner import Runner
from gristmill_worker.settings import WorkerSettings
from gristmill_worker.team import Team, TeamLostError

log = logging.getLogger(__name__)

T = TypeVar("T")

WORK_QUEUED_MAX: Final = 4096
TEAM_LOST: Final = 70
"""Exit status when another rank is gone: the whole team starts anew."""
LOAD_RETRY_S: Final = 2.0
"""Pause before a model that could not be loaded is tried again."""


class Engine:
    """`submit` hands work to the thread; everything that touches torch runs there."""

    def __init__(self, settings: WorkerSettings, team: Team | None = None) -> None:
        self.settings = settings
        self.team = team or Team()
        self.boot_id = str(uuid.uuid4())
        self.metrics = WorkerMetrics()
        self.runner: Runner | None = None
        self.failure = ""
        self.stopping = threading.Event()
        self.work: queue.Queue[Callable[[], None] | None] = queue.Queue(WORK_QUEUED_MAX)
        self.thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def ready(self) -> bool:
        return self.runner is not None and not self.stopping.is_set()

    def start(self) -> None:
        self.thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finish what runs, drop what waits. The thread dies with the process if it takes longer."""
        self.stopping.set()
        with contextlib.suppress(queue.Full):
            self.work.put_nowait(None)
        if self.runner is not None:  # else it waits for other ranks or for a model: nothing to lose
            self.thread.join(timeout_s)

    def submit(self, work: Callable[[Runner], T]) -> "Future[T]":
        """Raises UnavailableError before the model is loaded, OverloadedError on a full queue."""
        runner = self.runner
        if runner is None:
            raise UnavailableError(self.failure or "the worker is still loading its model")
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(runner))
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                done.set_exception(translated(error))

        try:
            self.work.put_nowait(run)
        except queue.Full:
            raise OverloadedError(f"{WORK_QUEUED_MAX} pieces of work wait already") from None
        return done

    def status(self) -> WorkerStatus:
        runner = self.runner
        facts = None if runner is None else runner.base.facts
        return WorkerStatus(
            boot_id=self.boot_id,
            model=self.settings.name,
            ready=self.ready,
            fingerprint="" if runner is None else runner.fingerprint,
            vocabulary_size=0 if facts is None else facts.vocabulary_size,
            context_length=0 if facts is None else facts.context_length,
            sessions={} if runner is None else runner.applied(),
            tallies={} if runner is None else runner.book.told(),
            devices=0 if runner is None else runner.devices,
        )

    def _main(self) -> None:
        try:
            self._work()
        except TeamLostError as error:
            # What ran has no result; between operations every rank's state is whole.
            log.critical("team_lost", extra={"error": str(error)})
            if self.runner is not None:
                self.runner.snapshot_all()
            logging.shutdown()
            os._exit(TEAM_LOST)

    def _work(self) -> None:
        self.team.join(
            backend(self.settings), start_s=self.settings.team_start_s,
            timeout_s=self.settings.team_timeout_s,
        )  # fmt: skip
        self.runner = self._load_until_done()
        while not self.stopping.is_set():
            work = self.work.get()
            if work is not None:
                work()
            self.metrics.queued.set(self.work.qsize())
        if self.runner is not None:
            self.runner.snapshot_all()
            self.team.tell(Finish())

    def _load_until_done(self) -> Runner | None:
        """The runner; None once told to stop. A model folder may come back: a volume mounted late."""
        while not self.stopping.is_set():
            try:
                runner = self._load()
            except Exception as error:
                folder = self.settings.model_dir
                self.failure = f"the model in {folder} was not loaded: {error}"
                log.exception("model_load_failed", extra={"model_dir": str(folder)})
                self.stopping.wait(LOAD_RETRY_S)
            else:
                self.failure = ""
                log.info("model_loaded", extra={"fingerprint": runner.fingerprint})
                return runner
        return None

    def _load(self) -> Runner:
        settings = self.settings
        base = load_base(settings)
        disk = HostDisk()
        settings.artifacts_dir.mkdir(parents=True, exist_ok=True)
        self.team.gather("loaded")
        return Runner(
            base=base,
            disk=disk,
            checkpoints=Checkpoints(disk, base, settings.artifacts_dir, settings.adapters_cached),
            metrics=self.metrics,
            fingerprint=fingerprint(base, settings.token_budget, self.team.world),
            boot_id=self.boot_id,
            token_budget=settings.token_budget,
            snapshots_kept=settings.snapshots_kept,
            team=self.team,
        )


def load_base(settings: WorkerSettings) -> BaseModel:
    """Set torch up as the settings say, and load the base model. The same on every rank."""
    torch.set_num_threads(thread_count(settings.threads))
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    return load_base_model(
        settings.model_dir,
        dtype=getattr(torch, settings.dtype),
        device=_device(settings.device),
        path=settings.path,
    )


def backend(settings: WorkerSettings) -> str:
    """Of the collectives: what suits the device, unless the settings name one."""
    if settings.backend != "auto":
        return settings.backend
    return "nccl" if _device(settings.device).type == "cuda" else "gloo"


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
