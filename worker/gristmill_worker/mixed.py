"""forward_backward of several adapters in one pass: base products over all rows, low-rank ones for each adapter.

Off: the engine runs one request at a time, so that which datums share a pass follows from the request alone,
and a replay gives the same bits. Many small requests together are faster, and equal but for the last bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gristmill_contracts.operations import Datum, Forward, ForwardBackward, ForwardResult
from gristmill_worker.adapter import Adapter, gradient_views
from gristmill_worker.batch import MicroBatch, plan
from gristmill_worker.fast.model import FastModel, Served
from gristmill_worker.runs import Run
from gristmill_worker.targets import dense
from gristmill_worker.train import Part, Rows, by_shape, gather_rows, result_of, score

COUPLED: Final = ("dpo",)
"""Losses that need two passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, and the adapter that it trains."""

    adapter: Adapter
    op: ForwardBackward


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Datums of one job that lie together in a pass."""

    job: int
    indices: list[int]
    part: MicroBatch

    @property
    def tokens(self) -> int:
        return sum(run.length * run.segments for run in self.part.runs)


def forward_backward_mixed(
    base: FastModel, jobs: Sequence[Job], budget: int
) -> list[tuple[ForwardResult, Tensor]]:
    """Of each job its result and its gradient, flat float32. Raises ValueError for a loss of two passes."""
    if any(job.op.loss in COUPLED for job in jobs):
        raise ValueError(f"{', '.join(COUPLED)} runs in two passes; run it on its own")
    dense_ops = [dense(job.op) for job in jobs]
    gradients = [torch.zeros_like(job.adapter.weights) for job in jobs]
    done = [Part() for _ in jobs]
    for units in passes([op.datums for op in dense_ops], budget):
        served = [
            Served(
                adapter=jobs[unit.job].adapter, rows=unit.tokens,
                gradient=gradient_views(jobs[unit.job].adapter.layout, gradients[unit.job]),
            )
            for unit in units
        ]  # fmt: skip
        rows = [
            gather_rows(dense_ops[unit.job].datums, unit.indices, unit.part.filler, base.device)
            for unit in units
        ]
        with base.selected_each(served):
            hidden = base.hidden_packed(torch.cat([each.tokens for each in rows]), _table(units))
            leaf = hidden.detach().requires_grad_()
            start = 0
            for unit, own in zip(units, rows, strict=True):
                mine = leaf[start : start + sum(own.lengths)]
                _score_unit(base, mine, own, dense_ops[unit.job], done[unit.job])
                start += unit.tokens
            # The losses are in: one backward pass for all.
            assert leaf.grad is not None
            torch.autograd.backward(hidden, leaf.grad)
    return [
        (result_of(job.op, [part]), gradient)
        for job, part, gradient in zip(jobs, done, gradients, strict=True)
    ]


def passes(datums: Sequence[list[Datum]], budget: int) -> Iterator[list[Unit]]:
    """Which datums of which jobs share a pass: in the order of the jobs, at most `budget` tokens or one unit."""
    held: list[Unit] = []
    for unit in _units(datums, budget):
        if held and sum(each.tokens for each in held) + unit.tokens > budget:
            yield held
            held = []
        held.append(unit)
    if held:
        yield held


def _units(datums: Sequence[list[Datum]], budget: int) -> Iterator[Unit]:
    for job, own in enumerate(datums):
        for members in by_shape(own, list(range(len(own)))):
            lengths = [own[index].tokens.size for index in members]
            for part in plan(lengths, budget, packed=True):
                yield Unit(job=job, indices=[members[at] for at in part.order], part=part)


def _table(units: list[Unit]) -> tuple[Run, ...]:
    found: list[Run] = []
    start = 0
    for unit in units:
        found += [run._replace(start=start + run.start) for run in unit.part.runs]
        start += unit.tokens
    return tuple(found)


def _score_unit(
    base: FastModel, hidden: Tensor, rows: Rows, op: Forward | ForwardBackward, done: Part
) -> None:
    logprobs = score(base, hidden, rows, op, done.tally)
    for index, own in zip(rows.indices, torch.split(logprobs, rows.lengths), strict=True):
        done.outputs[index] = {"logprobs": own.cpu()}
