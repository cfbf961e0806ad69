"""Ten thousand operations at one worker: does its memory grow, does it get slower?

    PYTHONPATH=tests/support python benchmarks/soak.py [--operations 10000] [--model MODEL_FOLDER]

A worker process on a tiny random model (or a prepared one), one session, training, sampling, scoring,
snapshots, saves and loads in turn, lengths that change all the time. Floors: RSS grows by at most
1 MB/min after the first minute, and the last minute's speed is at least 0.95 of the second minute's
(of a run shorter than five minutes: fifths of it). The speed says something on an idle machine only.
"""

import argparse
import tempfile
from pathlib import Path

from gristmill_testing.bare_worker import running_worker
from gristmill_testing.soaking import Soak, soak
from gristmill_testing.tiny_models import build_tiny_llama

GROWTH_FLOOR_MB_PER_MINUTE = 1.0
SPEED_FLOOR = 0.95


def tenths(found: Soak) -> list[float]:
    readings = found.readings
    return [readings[at * (len(readings) - 1) // 10].rss_bytes / 1e6 for at in range(1, 11)]


def report(found: Soak) -> list[str]:
    first, last = found.after_warm_up()[0], found.readings[-1]
    growth, speed = found.growth_mb_per_minute(), found.speed_ratio()
    rate = last.operations / last.at_s
    return [
        f"operations              {last.operations} in {last.at_s:.0f} s, {rate:.0f} a second",
        f"RSS, a tenth at a time  {', '.join(f'{each:.0f}' for each in tenths(found))} MB",
        f"RSS after warm-up, end  {first.rss_bytes / 1e6:.1f} MB, {last.rss_bytes / 1e6:.1f} MB",
        f"RSS slope               {growth:+.2f} MB/min (floor: at most {GROWTH_FLOOR_MB_PER_MINUTE})",
        f"last window / second    {speed:.3f} (floor: at least {SPEED_FLOOR}), "
        f"windows of {found.window_s:.0f} s",
        f"the same by processor   {found.cpu_speed_ratio():.3f}, {last.cpu_s / last.operations * 1e3:.1f} ms "
        "of processor time for an operation",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument(
        "--model", type=Path, help="prepared base model; default: a tiny random one"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or build_tiny_llama(folder / "model")
        with running_worker(folder, model, dtype=given.dtype, threads=given.threads) as worker:
            worker.open(rank=8, alpha=16)
            print(f"fingerprint of the worker: {worker.status().fingerprint}")
            found = soak(worker, given.operations)
            worker.close()
    print(*report(found), sep="\n")


if __name__ == "__main__":
    main()
