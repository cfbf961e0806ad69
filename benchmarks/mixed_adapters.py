"""A small request of each of several adapters: all in one pass, against one after another.

    PYTHONPATH=tests/support python benchmarks/mixed_adapters.py MODEL_FOLDER [--alternations 5]

MODEL_FOLDER is a prepared Llama-shaped base model, SmolLM2-135M as a rule. The two ways take turns in one
process, so that a busy machine hurts them alike; what counts is the ratio of their medians. Processor time is
printed beside the wall's.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.local_runner import datum, load
from gristmill_worker import train
from gristmill_worker.adapter import fresh_weights, make_adapter
from gristmill_worker.fast.model import FastModel
from gristmill_worker.mixed import Job, forward_backward_mixed
from gristmill_worker.team import Team

RANK, ALPHA = 16, 32
BUDGET = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    given = parser.parse_args()
    base = load(given.folder, getattr(torch, given.dtype), "fast")
    assert isinstance(base, FastModel)
    print(
        f"{given.adapters} adapters of rank {RANK}, {given.dtype}, {torch.get_num_threads()} threads"
    )
    print("| tokens of each | one after another | in one pass | ratio | ratio of processor time |")
    print("|---|---|---|---|---|")
    for length in (8, 32, 128):
        apart, together = measure(base, make_jobs(base, given.adapters, length), given.alternations)
        wall, cpu = (a / b for a, b in zip(apart, together, strict=True))
        print(
            f"| {length} | {1e3 * apart[0]:.0f} ms | {1e3 * together[0]:.0f} ms | {wall:.2f} | {cpu:.2f} |"
        )


def make_jobs(base: FastModel, count: int, length: int) -> list[Job]:
    rng = random.Random(0)
    layout = base.layout(RANK)
    return [
        Job(
            adapter=make_adapter(
                layout, ALPHA, fresh_weights(layout, seed), device=base.device, dtype=base.dtype
            ),
            op=ForwardBackward(
                loss="cross_entropy",
                loss_config={},
                datums=[datum(rng.choices(range(100, base.facts.vocabulary_size), k=length))],
            ),
        )
        for seed in range(count)
    ]


def measure(
    base: FastModel, jobs: list[Job], alternations: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median (wall, processor) seconds of both ways; the first turn of each warms up."""

    def apart() -> None:
        for job in jobs:
            train.forward_backward(base, job.adapter, job.op, BUDGET, Team())

    def together() -> None:
        forward_backward_mixed(base, jobs, BUDGET)

    turns = [(timed(apart), timed(together)) for _ in range(alternations + 1)][1:]
    first, second = (
        (statistics.median(t[way][0] for t in turns), statistics.median(t[way][1] for t in turns))
        for way in (0, 1)
    )
    return first, second


def timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
