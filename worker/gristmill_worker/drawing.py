"""The next token of each row of a step, and its log-probability."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill_worker.chance import uniform
from gristmill_worker.choose import distribution, draw, pick
from gristmill_worker.groups import Group, Row


def choose(logits: Tensor, asked: Sequence[tuple[Group, Row]]) -> Tensor:
    """(B, V) -> (B,) ids. Rows that are drawn alike are drawn together."""
    alike: dict[tuple[float, int, float], list[int]] = {}
    for index, (group, _) in enumerate(asked):
        params = group.op.params
        alike.setdefault((params.temperature, params.top_k, params.top_p), []).append(index)
    if len(alike) == 1:
        return _choose(logits, asked)
    ids = torch.empty(len(asked), dtype=torch.int64, device=logits.device)
    for members in alike.values():
        at = torch.tensor(members, device=logits.device)
        ids[at] = _choose(logits[at], [asked[index] for index in members])
    return ids


def _choose(logits: Tensor, asked: Sequence[tuple[Group, Row]]) -> Tensor:
    params = asked[0][0].op.params
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    numbers = [uniform(g.op.params.seed, row.sample, len(row.tokens)) for g, row in asked]
    draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    if params.top_k == -1 and params.top_p >= 1.0:
        return draw(logits, params.temperature, draws)
    return pick(distribution(logits, params.temperature, params.top_k, params.top_p), draws)


def score(logits: Tensor, ids: Tensor, asked: Sequence[tuple[Group, Row]]) -> list[float]:
    """Log-probabilities of the chosen tokens: the model's own, or those of what they were drawn from."""
    raw = logits.gather(1, ids[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
    found: list[float] = raw.tolist()
    for index, (group, _) in enumerate(asked):
        params = group.op.params
        # The greedy choice has no distribution: its own log-probability says more than 0.
        if params.logprobs == "processed" and params.temperature > 0:
            weights = distribution(
                logits[index : index + 1], params.temperature, params.top_k, params.top_p
            )
            found[index] = float(weights[0, ids[index]].log())
    return found
