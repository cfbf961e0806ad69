"""Run seeds: `python -m gristmill_testing.simulation.run --seeds 1000-1999`."""

import argparse
import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from unittest.mock import patch

from gristmill_meter import meter as meter_module
from gristmill_testing.simulation.books import short_leases
from gristmill_testing.simulation.loop import BrokenOffError, SimLoop, StuckError, running
from gristmill_testing.simulation.mutations import MUTATIONS, plant
from gristmill_testing.simulation.pods import SimFolder
from gristmill_testing.simulation.world import Trace, World

SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a seed ended. `trace`: the digest of all that happened."""

    seed: int
    trace: str
    violations: list[str]
    last: list[str]
    steps: int
    virtual_s: float

    @property
    def report(self) -> str:
        lines = [f"seed {self.seed} broke {len(self.violations)} promises:"]
        lines += [f"  {what}" for what in self.violations[:10]]
        lines += ["the last events:", *(f"  {line}" for line in self.last[-SHOWN:])]
        lines.append(f"again: make simulate SEEDS={self.seed} ARGS=--verbose")
        return "\n".join(lines)


@contextmanager
def _quiet(*, verbose: bool) -> Iterator[None]:
    before = logging.root.manager.disable
    if not verbose:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run_seed(seed: int, mutation: str | None = None, *, verbose: bool = False) -> Outcome:
    """One world from start to end. The same seed does the same, to the last event.

    mutation: the name of a bug to plant.
    """
    if mutation is not None:
        with plant(next(each for each in MUTATIONS if each.name == mutation)):
            return run_seed(seed, verbose=verbose)
    trace = Trace(keep=1_000_000 if verbose else 400)
    loop = SimLoop(seed, trace.note)
    trace.now = loop.time
    folders = patch.object(meter_module, "AssignmentsFolder", SimFolder)
    with _quiet(verbose=verbose), running(loop), folders:
        violations = _run_world(seed, loop, trace)
    return Outcome(
        seed=seed,
        trace=trace.digest,
        violations=violations,
        last=list(trace.last),
        steps=loop.steps,
        virtual_s=loop.now,
    )


def _run_world(seed: int, loop: SimLoop, trace: Trace) -> list[str]:
    """What was broken. Nothing of the world is left when it returns, but what the loop keeps."""
    world = World(seed, loop, trace)
    try:
        # Here and not in the coroutine: a run that breaks off never comes to its end.
        with short_leases(world.plan.lease_s):
            loop.run_until_complete(world.run())
    except BrokenOffError:
        pass
    except StuckError as error:
        world.audit.fail(f"{error}: {world.state()}")
    except Exception as error:  # noqa: BLE001 - a run that breaks off has failed
        world.audit.fail("".join(traceback.format_exception(error)[-4:]))
    for unexpected in loop.errors:
        world.audit.fail(f"unexpected: {unexpected}")
    return world.audit.violations


def run_seeds(
    seeds: Iterable[int], processes: int, mutation: str | None = None
) -> Generator[Outcome, None, None]:
    """In this order. Whoever needs no more of them closes the iterator, and the rest is not run."""
    run = partial(run_seed, mutation=mutation)
    if processes == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(processes) as pool:
        waiting = [pool.submit(run, seed) for seed in seeds]
        try:
            for each in waiting:
                yield each.result()
        finally:
            pool.shutdown(cancel_futures=True)


@cache
def _elsewhere() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def run_apart(seeds: Iterable[int], mutation: str | None = None) -> Iterator[Outcome]:
    """The same in another process: clocks and collector of the caller's process stay as they are.

    Libraries that are first imported in virtual time keep its clocks for good. One process serves all
    callers, for its imports take longer than many a run; `leave` ends it. Nothing runs ahead.
    """
    for seed in seeds:
        try:
            yield _elsewhere().submit(run_seed, seed, mutation).result()
        except BrokenProcessPool:
            _elsewhere.cache_clear()
            raise


def leave() -> None:
    """End the process of `run_apart`."""
    if _elsewhere.cache_info().currsize:
        _elsewhere().shutdown()
        _elsewhere.cache_clear()


def seeds_of(text: str) -> list[int]:
    """`7`, `1-500`, or several of them with commas."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=seeds_of("1-100"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--mutation", help="plant this bug; with `all`, find the first seed of each"
    )
    parser.add_argument("--verbose", action="store_true", help="print every event and log line")
    given = parser.parse_args()
    if given.mutation == "all":
        return _first_seeds(given.seeds, given.processes)
    if given.verbose:
        outcome = run_seed(given.seeds[0], given.mutation, verbose=True)
        sys.stdout.write("\n".join(outcome.last) + f"\n{outcome.report}\n")
        return bool(outcome.violations)
    return _campaign(given.seeds, given.processes)


def _first_seeds(seeds: list[int], processes: int) -> int:
    """For each planted bug, the first seed that catches it."""
    missed = 0
    for mutation in MUTATIONS:
        outcomes = run_seeds(seeds, processes, mutation.name)
        caught = next((each for each in outcomes if each.violations), None)
        outcomes.close()
        missed += caught is None
        found = "MISSED" if caught is None else f"{caught.seed}: {caught.violations[0][:120]}"
        sys.stdout.write(f"{mutation.name}: {found}\n")
        sys.stdout.flush()
    return bool(missed)


def _campaign(seeds: list[int], processes: int) -> int:
    started, failed = time.monotonic(), []
    steps = virtual_s = 0.0
    for at, outcome in enumerate(run_seeds(seeds, processes), start=1):
        steps, virtual_s = steps + outcome.steps, virtual_s + outcome.virtual_s
        if outcome.violations:
            failed.append(outcome.seed)
            sys.stdout.write(outcome.report + "\n")
        if at % 100 == 0 or at == len(seeds):
            took = time.monotonic() - started
            sys.stdout.write(
                f"{at} of {len(seeds)} seeds, {len(failed)} failed, {took:.0f} s, "
                f"{virtual_s / 3600:.1f} h of virtual time, {steps:.0f} steps\n"
            )
            sys.stdout.flush()
    if failed:
        sys.stdout.write(f"failed: {','.join(map(str, failed))}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
