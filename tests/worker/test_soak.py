"""Hundreds of operations of all kinds leave a worker's memory where it was. The long run: benchmarks/soak.py."""

from pathlib import Path

import pytest

from gristmill_testing.bare_worker import running_worker
from gristmill_testing.soaking import Reading, Soak, soak

GROWTH_MAX_BYTES = 100 * 2**20
"""Far more than allocators and threads settle at, and far less than a leak in every operation comes to."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_hundred_operations_do_not_make_a_worker_grow(tmp_path: Path, llama_dir: Path) -> None:
    with running_worker(tmp_path, llama_dir, dtype="float32", threads=1) as worker:
        worker.open(rank=8, alpha=16)
        readings = soak(worker, 500).readings
        worker.close()
    warm = next(each for each in readings if each.operations >= 100)
    assert readings[-1].operations >= 500
    assert readings[-1].rss_bytes - warm.rss_bytes < GROWTH_MAX_BYTES


def made_up(seconds: int, growth_mb: float, slower_after_s: int) -> Soak:
    """A reading a second: ten operations in each, five once it got slower."""
    found, done = Soak(), 0
    for at in range(seconds + 1):
        done += 10 if at < slower_after_s else 5
        rss = int(1e8 + growth_mb * 1e6 * at / 60)
        found.readings.append(Reading(float(at), done, rss, cpu_s=done / 20))
    return found


def test_growth_and_speed_are_told_from_readings() -> None:
    steady = made_up(600, growth_mb=0.0, slower_after_s=10_000)
    assert steady.growth_mb_per_minute() == pytest.approx(0.0, abs=1e-6)
    assert steady.speed_ratio() == pytest.approx(1.0)
    worse = made_up(600, growth_mb=3.0, slower_after_s=300)
    assert worse.growth_mb_per_minute() == pytest.approx(3.0, rel=1e-3)
    assert worse.speed_ratio() == pytest.approx(0.5)
    assert worse.cpu_speed_ratio() == pytest.approx(1.0)


def test_the_windows_of_a_short_run_are_fifths_of_it() -> None:
    assert made_up(600, 0.0, 10_000).window_s == 60
    assert made_up(100, 0.0, 10_000).window_s == 20
