"""dpo's two passes: one that scores the pairs, and one of cross_entropy that has their gradient."""

from dataclasses import dataclass

from gristmill_contracts.operations import Datum, Forward, ForwardBackward, ForwardResult
from gristmill_worker.losses.dpo import judge_pairs
from gristmill_worker.tensors import from_torch, to_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the first pass came to."""

    pulling: ForwardBackward
    """The second pass: its gradient is the loss's."""
    result: ForwardResult


def scoring(op: Forward | ForwardBackward) -> Forward:
    """The first pass."""
    return Forward(loss="cross_entropy", loss_config={}, datums=op.datums)


def judged(op: Forward | ForwardBackward, scored: ForwardResult) -> Judged:
    """Raises OperationFailedError if a pair's loss is not finite: the same on every rank."""
    found = judge_pairs(
        [to_torch(output["logprobs"]) for output in scored.outputs],
        [to_torch(datum.loss_inputs["weights"]) for datum in op.datums],
        [to_torch(datum.loss_inputs["ref_log_prob"]) for datum in op.datums],
        op.loss_config,
    )
    datums = [
        Datum(datum.tokens, {**datum.loss_inputs, "weights": from_torch(weights)})
        for datum, weights in zip(op.datums, found.weights, strict=True)
    ]
    return Judged(
        pulling=ForwardBackward(loss="cross_entropy", loss_config={}, datums=datums),
        result=ForwardResult(outputs=scored.outputs, metrics={**scored.metrics, **found.metrics}),
    )
