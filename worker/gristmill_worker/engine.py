"""The engine thread: loads the model, then runs one piece at a time: of work, first come first served, or
of sampling, whose batch all samples share. The scheduler says which."""

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

import torch

from gristmill_contracts.errors import OverloadedError, UnavailableError
from gristmill_contracts.http import Execute, Executed, WorkerStatus
from gristmill_worker.base_model import BaseModel
from gristmill_worker.checkpoints import Checkpoints
from gristmill_worker.counters import WorkerMetrics
from gristmill_worker.cpu_quota import thread_count
from gristmill_worker.devices import device_of, prepare_device
from gristmill_worker.disk import HostDisk
from gristmill_worker.fingerprint import fingerprint
from gristmill_worker.loading import load_base_model
from gristmill_worker.orders import Finish
from gristmill_worker.prefixes import Prefixes
from gristmill_worker.problems import translated
from gristmill_worker.recompute import Keeper
from gristmill_worker.room import Room, on_host, room_on
from gristmill_worker.runner import Runner
from gristmill_worker.sampler import Sampler
from gristmill_worker.scheduler import Capacity, Shares
from gristmill_worker.settings import WorkerSettings
from gristmill_worker.sharding import Sharding, room_beside
from gristmill_worker.sizes import sizes_of
from gristmill_worker.stream import TokenStream
from gristmill_worker.team import Team, TeamLostError

log = logging.getLogger(__name__)

T = TypeVar("T")

WORK_QUEUED_MAX: Final = 4096
TEAM_LOST: Final = 70
"""Exit status when another rank is gone: the whole team starts anew."""
ENGINE_LOST: Final = 71
"""Exit status when the engine's own loop failed: no operation's error, those are answered."""
MIB: Final = 2**20
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
        self.work: queue.Queue[Callable[[], None]] = queue.Queue(WORK_QUEUED_MAX)
        self.arrivals: queue.Queue[Callable[[], None]] = queue.Queue(WORK_QUEUED_MAX)
        """Samples that have not joined the batch yet."""
        self.rung = threading.Event()
        """Set whenever there may be something to do."""
        self.shares = Shares()
        self.thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def ready(self) -> bool:
        return self.runner is not None and not self.stopping.is_set()

    def start(self) -> None:
        self.thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finish what runs, drop what waits. The thread dies with the process if it takes longer."""
        self.stopping.set()
        self.rung.set()
        if self.runner is not None:  # else it waits for other ranks or for a model: nothing to lose
            self.thread.join(timeout_s)

    def submit(self, work: Callable[[Runner], T]) -> "Future[T]":
        """Raises UnavailableError before the model is loaded, OverloadedError on a full queue."""
        runner = self._loaded()
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work(runner))
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                done.set_exception(translated(error))

        self._put(self.work, run)
        return done

    def sample(
        self, uid: str, call: Execute, tokens: Callable[[Runner], TokenStream] | None = None
    ) -> "Future[Executed]":
        """Hand in a sample; it joins the batch between two decode steps. Raises as `submit` does."""
        runner = self._loaded()
        if runner.sampler.count >= WORK_QUEUED_MAX:
            raise OverloadedError(f"{WORK_QUEUED_MAX} samples wait already")
        done: Future[Executed] = Future()
        done.set_running_or_notify_cancel()

        def begin() -> None:
            try:
                runner.begin(uid, call, done.set_result, None if tokens is None else tokens(runner))
            except Exception as error:  # noqa: BLE001 - whoever waits gets it
                done.set_exception(translated(error))

        self._put(self.arrivals, begin)
        return done

    def _loaded(self) -> Runner:
        if self.runner is None:
            raise UnavailableError(self.failure or "the worker is still loading its model")
        return self.runner

    def _put(self, where: "queue.Queue[Callable[[], None]]", piece: Callable[[], None]) -> None:
        try:
            where.put_nowait(piece)
        except queue.Full:
            raise OverloadedError(f"{WORK_QUEUED_MAX} pieces of work wait already") from None
        self.rung.set()

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
        except Exception:
            # Without this thread nothing would ever be answered; a new process goes on from the snapshots.
            log.critical("engine_lost", exc_info=True)
            logging.shutdown()
            os._exit(ENGINE_LOST)

    def _work(self) -> None:
        self.team.join(
            backend(self.settings), start_s=self.settings.team_start_s,
            timeout_s=self.settings.team_timeout_s,
        )  # fmt: skip
        self.runner = self._load_until_done()
        while self.runner is not None and not self.stopping.is_set():
            self._turn(self.runner)
        if self.runner is not None:
            self.runner.sampler.drop(None, UnavailableError("the worker is being stopped"))
            self.runner.snapshot_all()
            self.team.tell(Finish())

    def _turn(self, runner: Runner) -> None:
        """One piece of whoever's turn it is; waits where nobody has any."""
        while not self.arrivals.empty():
            self.arrivals.get_nowait()()
        side = self.shares.next(work=not self.work.empty(), sampling=runner.sampler.busy)
        if side is None:
            self.rung.wait()
            self.rung.clear()
            return
        began = time.monotonic()
        if side == "work":
            self.work.get_nowait()()
            waits = runner.sampler.busy or not self.arrivals.empty()
        else:
            _sampling_turn(runner)
            waits = not self.work.empty()
        if runner.base.shards is not None:
            runner.base.shards.settle()
        self.shares.ran(side, time.monotonic() - began, other_waits=waits)
        if not (runner.sampler.busy or not self.arrivals.empty()):
            self.shares.sampling_ended()
        self.metrics.queued.set(self.work.qsize() + runner.sampler.count)

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
        base = load_base(settings, self.team)
        disk = HostDisk()
        settings.artifacts_dir.mkdir(parents=True, exist_ok=True)
        self.team.gather("loaded")
        room = Room(
            sizes_of(base), budget=settings.token_budget, packed=base.packed,
            world=self.team.world, available=room_beside(base),
            kv_bytes_max=settings.kv_cache_mib * MIB, recomputes=base.keeper is not None,
            host=on_host,
        )  # fmt: skip
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
            room=room,
            sampler=new_sampler(base, settings, room),
        )


def _sampling_turn(runner: Runner) -> None:
    try:
        runner.sampler.turn()
    except Exception as error:
        # Not of a group, which the sampler sees to: nobody knows what still holds.
        log.exception("sampling_lost")
        runner.sampler.drop(None, translated(error))


def new_sampler(base: BaseModel, settings: WorkerSettings, room: Room) -> Sampler:
    capacity = Capacity(
        positions_max=settings.kv_cache_mib * MIB // base.position_bytes,
        adapters_max=settings.adapters_cached,
        tokens_max=settings.token_budget,
    )
    prefixes = Prefixes(base, settings.prefix_cache_mib * MIB)
    return Sampler(base, capacity, prefixes, holds=room.holds_together)


def load_base(settings: WorkerSettings, team: Team) -> BaseModel:
    """Set torch up as the settings say, and load the base model. The same on every rank."""
    torch.set_num_threads(thread_count(settings.threads))
    device = _device(settings.device)
    prepare_device(device)
    base = load_base_model(
        settings.model_dir,
        dtype=getattr(torch, settings.dtype),
        device=device,
        path=settings.path,
        sharding=Sharding(team, device, settings.base_weights, room_on(device)),
    )
    base.invariant = settings.batch_invariant
    if base.path == "fast":
        base.keeper = Keeper(sizes_of(base), room_beside(base))
    return base


def backend(settings: WorkerSettings) -> str:
    """Of the collectives: what suits the device, unless the settings name one."""
    if settings.backend != "auto":
        return settings.backend
    return "nccl" if _device(settings.device).type == "cuda" else "gloo"


def _device(wanted: str) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return device_of(wanted, gpus=gpus, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
