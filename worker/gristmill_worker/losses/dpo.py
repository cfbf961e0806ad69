"""L = -mean over pairs of log sigmoid(h), h = beta [(sum w p - sum w ref) of the chosen - the same of the rejected].

A pair is two neighbours in a request, the chosen one first. The loss couples their tokens, so it takes two
passes: one that scores, and one of cross_entropy whose weights are -dL/dp. Rafailov et al. 2023, eq. 7.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill_contracts.errors import OperationFailedError
from gristmill_worker.losses.terms import masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the pairs of a request come to."""

    weights: list[Tensor]
    """(N,) of each datum: for a pass of cross_entropy that has dpo's gradient."""
    metrics: dict[str, float]


def judge_pairs(
    logprobs: list[Tensor],
    weights: list[Tensor],
    references: list[Tensor],
    config: dict[str, float],
) -> Judged:
    """Chosen and rejected datums by turns, (N,) each.

    The mean is over `pairs` of the config, or else over those of this request: a client that sends its
    pairs in several requests names their number, and the gradients add up to one request's.
    Raises OperationFailedError if a pair's loss is not finite.
    """
    beta, count = config["beta"], config.get("pairs", len(logprobs) / 2)
    rewards = torch.stack(
        [
            beta * masked(w, w.double() * (p.double() - ref.double())).sum()
            for p, w, ref in zip(logprobs, weights, references, strict=True)
        ]
    ).view(-1, 2)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -torch.nn.functional.logsigmoid(margins)
    if not bool(torch.isfinite(losses).all()):
        pair = int((~torch.isfinite(losses)).nonzero()[0])
        raise OperationFailedError(
            f"datums {2 * pair} and {2 * pair + 1}: the pair's loss is not finite; nothing was accumulated, "
            "check their ref_log_prob"
        )
    pulls = (beta * torch.sigmoid(-margins) / count).tolist()
    signed = [sign * pull for pull in pulls for sign in (1.0, -1.0)]
    return Judged(
        weights=[(sign * w.double()).float() for sign, w in zip(signed, weights, strict=True)],
        metrics={
            "loss_sum": float(losses.sum()) / count,
            "pair_accuracy": float((margins > 0).double().mean()),
            "margin_mean": float(margins.mean()),
            "chosen_reward_mean": float(rewards[:, 0].mean()),
            "rejected_reward_mean": float(rewards[:, 1].mean()),
        },
    )
