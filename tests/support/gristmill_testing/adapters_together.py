"""A small request of each of eight adapters: all in one pass, against one after another."""

import time

from gristmill_contracts.operations import ForwardBackward
from gristmill_testing.contenders import random_batch
from gristmill_testing.engine_bounds import ONE_BY_ONE
from gristmill_testing.local_runner import BUDGET, datum
from gristmill_testing.peers import ALPHA, RANK
from gristmill_testing.turns import OURS, Measure, Turn, take_turns, timed
from gristmill_worker import train
from gristmill_worker.adapter import fresh_weights, make_adapter
from gristmill_worker.fast.model import FastModel
from gristmill_worker.mixed import Job, forward_backward_mixed
from gristmill_worker.team import Team

ADAPTERS = 8


def adapters_together(base: FastModel, name: str, length: int, turns: int) -> Measure:
    """`length` tokens of each adapter. Ours is the one pass."""
    jobs = make_jobs(base, length)

    def apart(_seed: int) -> tuple[Turn, ...]:
        def work() -> int:
            for job in jobs:
                train.forward_backward(base, job.adapter, job.op, BUDGET, Team())
            return ADAPTERS * length

        return (timed(work, time.process_time),)

    def together(_seed: int) -> tuple[Turn, ...]:
        def work() -> int:
            forward_backward_mixed(base, jobs, BUDGET)
            return ADAPTERS * length

        return (timed(work, time.process_time),)

    [measure] = take_turns([name], {OURS: together, ONE_BY_ONE: apart}, turns)
    return measure


def make_jobs(base: FastModel, length: int) -> list[Job]:
    layout = base.layout(RANK)
    rows = random_batch(base.facts.vocabulary_size, [length] * ADAPTERS, seed=0)
    return [
        Job(
            adapter=make_adapter(
                layout, ALPHA, fresh_weights(layout, seed), device=base.device, dtype=base.dtype
            ),
            op=ForwardBackward(loss="cross_entropy", loss_config={}, datums=[datum(row)]),
        )
        for seed, row in enumerate(rows)
    ]
