"""forward and forward_backward: datums in, log-probabilities out, the gradient in a scratch buffer."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from gristmill_contracts.errors import GristmillError, OperationFailedError
from gristmill_contracts.http import Problem
from gristmill_contracts.operations import Datum, Forward, ForwardBackward, ForwardResult
from gristmill_worker import pairs
from gristmill_worker.adapter import Adapter, gradient_views
from gristmill_worker.base_model import BaseModel
from gristmill_worker.batch import MicroBatch, plan
from gristmill_worker.head import Head
from gristmill_worker.losses import LOSSES
from gristmill_worker.losses.terms import TokenTerms
from gristmill_worker.optimizer import fit_for_a_step
from gristmill_worker.problems import error_of, problem_of, translated
from gristmill_worker.shares import shares
from gristmill_worker.targets import dense, sparse_again
from gristmill_worker.team import Team
from gristmill_worker.tensors import from_torch, to_torch

log = logging.getLogger(__name__)

HEAD_ROWS: Final = 256
"""Rows whose logits are held at a time: all tokens x vocabulary would not fit."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over the tokens of a request, in float64."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, terms: TokenTerms) -> None:
        self.loss += float(terms.value.sum(dtype=torch.float64))
        for name, value in terms.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        self.count += 0 if terms.count is None else int(terms.count)

    def merge(self, other: "Tally") -> None:
        self.loss += other.loss
        self.count += other.count
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        count = max(1, self.count)
        named = {"ratio": "ratio_mean", "clip": "clip_fraction", "kl_q_p": "kl_q_p_mean",
                 "kl_p_ref": "kl_p_ref_mean"}  # fmt: skip
        means = {named[name]: value / count for name, value in self.sums.items()}
        return {"loss_sum": self.loss, **means}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The tokens of a micro-batch (T, ...), and per-token loss inputs (T, K)."""

    tokens: Tensor
    inputs: dict[str, Tensor]
    lengths: list[int]
    indices: list[int]
    """Of the datums, in the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank made of its share of a request, or why it failed."""

    outputs: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Of the datums, by their index in the request; on the host."""
    tally: Tally = field(default_factory=Tally)
    problem: Problem | None = None


def forward(
    base: BaseModel, adapter: Adapter, op: Forward, budget: int, team: Team
) -> ForwardResult:
    """Score the datums. Changes nothing."""
    return _whole(base, adapter, op, budget, team=team, scratch=None)


def forward_backward(
    base: BaseModel,
    adapter: Adapter,
    op: ForwardBackward,
    budget: int,
    team: Team,
    *,
    scratch: Tensor | None = None,
) -> tuple[ForwardResult, Tensor]:
    """The result and the request's gradient, flat float32. Raises OperationFailedError if not finite.

    `scratch`: zeros for it to be put into.
    """
    if scratch is None:
        scratch = torch.zeros_like(adapter.weights)
    result = _whole(base, adapter, op, budget, team=team, scratch=scratch)
    team.sum(scratch)
    if not fit_for_a_step(scratch):
        raise OperationFailedError(
            "the gradient is not finite, or its norm is not; nothing was accumulated, check advantages "
            "and weights"
        )
    return result, scratch


def _whole(
    base: BaseModel,
    adapter: Adapter,
    op: Forward | ForwardBackward,
    budget: int,
    *,
    team: Team,
    scratch: Tensor | None,
) -> ForwardResult:
    """The result of all ranks' shares; each rank's own part of the gradient in `scratch`."""

    def run(operation: Forward | ForwardBackward, into: Tensor | None) -> ForwardResult:
        part = _attempt(base, adapter, operation, budget, team=team, scratch=into)
        return result_of(operation, team.gather(part))

    if op.loss == "dpo":
        scored = run(pairs.scoring(op), None)
        judged = pairs.judged(op, scored)
        if scratch is not None:
            run(judged.pulling, scratch)
        return judged.result
    return run(op, scratch)


def _attempt(
    base: BaseModel,
    adapter: Adapter,
    op: Forward | ForwardBackward,
    budget: int,
    *,
    team: Team,
    scratch: Tensor | None,
) -> Part:
    """This rank's share. A failure is a value: the other ranks must hear of it."""
    given = shares([datum.tokens.size for datum in op.datums], team.world)
    try:
        whole = dense(op)
        with _with_all_ranks(base, whole, budget, given, trains=scratch is not None):
            return _run(base, adapter, whole, budget, scratch=scratch, mine=given[team.rank])
    except Exception as error:
        if team.alone:
            raise
        failure = translated(error)
        if type(failure) is GristmillError:
            log.exception("share_crashed", extra={"rank": team.rank})
        return Part(problem=problem_of(failure))


def _with_all_ranks(
    base: BaseModel,
    op: Forward | ForwardBackward,
    budget: int,
    given: list[list[int]],
    *,
    trains: bool,
) -> AbstractContextManager[None]:
    """Where the base is sharded, a rank with fewer passes than another gathers as often as that one."""
    if base.shards is None:
        return nullcontext()
    passes = max(passes_of(op, mine, budget, packed=base.packed) for mine in given)
    return base.shards.together(passes, trains=trains)


def passes_of(op: Forward | ForwardBackward, mine: list[int], budget: int, *, packed: bool) -> int:
    """How many passes a rank runs for its share of a request."""
    lengths = [
        [op.datums[at].tokens.size for at in members] for members in by_shape(op.datums, mine)
    ]
    return sum(len(plan(each, budget, packed=packed)) for each in lengths)


def result_of(op: Forward | ForwardBackward, parts: list[Part]) -> ForwardResult:
    """One result of all ranks' parts. Raises the first failure among them."""
    tally = Tally()
    outputs: dict[int, dict[str, Tensor]] = {}
    for rank, part in enumerate(parts):
        if part.problem is not None:
            raise error_of(part.problem, f"rank {rank}: ")
        tally.merge(part.tally)
        outputs.update(part.outputs)
    metrics = tally.metrics()
    metrics["datums"] = float(len(op.datums))
    metrics["tokens"] = float(sum(datum.tokens.size for datum in op.datums))
    ordered = sparse_again(op.datums, [outputs[index] for index in range(len(op.datums))])
    named = [{key: from_torch(value) for key, value in each.items()} for each in ordered]
    return ForwardResult(outputs=named, metrics=metrics)


def _run(
    base: BaseModel,
    adapter: Adapter,
    op: Forward | ForwardBackward,
    budget: int,
    *,
    scratch: Tensor | None,
    mine: list[int],
) -> Part:
    views = None if scratch is None else gradient_views(adapter.layout, scratch)
    done = Part()
    for members in by_shape(op.datums, mine):
        lengths = [op.datums[index].tokens.size for index in members]
        for part in plan(lengths, budget, packed=base.packed):
            indices = [members[index] for index in part.order]
            rows = gather_rows(op.datums, indices, part.filler, base.device)
            with base.selected(adapter, views), torch.set_grad_enabled(scratch is not None):
                hidden = _hidden(base, rows, part)
                logprobs = score(base, hidden, rows, op, done.tally)
            for index, own in zip(indices, torch.split(logprobs, rows.lengths), strict=True):
                done.outputs[index] = {"logprobs": own.cpu()}
    return done


def by_shape(datums: list[Datum], mine: list[int]) -> list[list[int]]:
    """Indices of datums that can share rows: same width of targets, same loss inputs."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index in mine:
        datum = datums[index]
        width = datum.loss_inputs["target_tokens"].shape[1:]
        groups.setdefault((width, *sorted(datum.loss_inputs)), []).append(index)
    return list(groups.values())


def gather_rows(
    all_datums: list[Datum], indices: list[int], filler: int, device: torch.device
) -> Rows:
    datums = [all_datums[index] for index in indices]
    tokens = [to_torch(datum.tokens) for datum in datums]
    if filler:
        tokens.append(torch.zeros(filler, dtype=torch.int64))
    keys = datums[0].loss_inputs
    inputs = {
        key: torch.cat([_column(to_torch(datum.loss_inputs[key])) for datum in datums]).to(device)
        for key in keys
    }
    lengths = [datum.tokens.size for datum in datums]
    return Rows(
        tokens=torch.cat(tokens).to(device), inputs=inputs, lengths=lengths, indices=indices
    )


def _column(value: Tensor) -> Tensor:
    return value[:, None] if value.dim() == 1 else value


def _hidden(base: BaseModel, rows: Rows, part: MicroBatch) -> Tensor:
    if base.packed:
        hidden = base.hidden_packed(rows.tokens, part.runs)
        return hidden[: hidden.shape[0] - part.filler]
    return base.hidden(rows.tokens.view(-1, rows.lengths[0]))


def score(
    base: BaseModel,
    hidden: Tensor,
    rows: Rows,
    op: Forward | ForwardBackward,
    tally: Tally,
) -> Tensor:
    """Log-probabilities (T,) or (T, K); runs the backward pass if `hidden` has a graph."""
    wants_gradient = hidden.requires_grad
    source = hidden.detach()
    d_hidden = torch.zeros_like(source) if wants_gradient else None
    logprobs = torch.empty(rows.inputs["target_tokens"].shape, device=source.device)
    values = torch.empty_like(logprobs)
    with torch.no_grad():
        for start in range(0, source.shape[0], HEAD_ROWS):
            at = slice(start, start + HEAD_ROWS)
            inputs = {key: value[at] for key, value in rows.inputs.items()}
            p, terms, gradient = _score_rows(
                base.head, source[at], inputs, op, wants_gradient=wants_gradient
            )
            logprobs[at], values[at] = p, terms.value
            tally.add(terms)
            if d_hidden is not None and gradient is not None:
                d_hidden[at] = gradient
        _check_finite(values, rows)
    if d_hidden is not None:
        torch.autograd.backward(hidden, d_hidden)
    wide = op.datums[rows.indices[0]].loss_inputs["target_tokens"].shape[1:]
    return logprobs if wide else logprobs[:, 0]


def _score_rows(
    head: Head,
    hidden: Tensor,
    inputs: dict[str, Tensor],
    op: Forward | ForwardBackward,
    *,
    wants_gradient: bool,
) -> tuple[Tensor, TokenTerms, Tensor | None]:
    """One chunk: p (R, K), what the loss says of it, and the gradient of the hidden rows."""
    logits = head.logits(hidden)
    temperature = inputs.get("temperature")
    targets = inputs["target_tokens"]
    scores = torch.log_softmax(logits if temperature is None else logits / temperature, dim=-1)
    p = scores.gather(1, targets)
    terms = LOSSES[op.loss](p, inputs, op.loss_config)
    if not wants_gradient or not bool(terms.coefficient.any()):
        return p, terms, None
    # dL/dz = sum_k c_k (onehot_k - softmax)
    d_z = scores.exp_().mul_(-terms.coefficient.sum(dim=1, keepdim=True))
    d_z.scatter_add_(1, targets, terms.coefficient)
    if temperature is not None:
        d_z /= temperature
    return p, terms, head.backward(d_z, logits)


def _check_finite(values: Tensor, rows: Rows) -> None:
    if bool(torch.isfinite(values).all()):
        return
    for index, own in zip(rows.indices, torch.split(values, rows.lengths), strict=True):
        if not bool(torch.isfinite(own).all()):
            raise OperationFailedError(
                f"datum {index}: the loss is not finite; nothing was accumulated, check its "
                "advantages, logprobs and weights"
            )
