"""L = -sum m [A p - (beta / 2) (p - q)^2]: a step away from the behaviour costs its square."""

import torch
from torch import Tensor

from gristmill_worker.losses.terms import TokenTerms, mask_of, policy_terms


def dro(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float]) -> TokenTerms:
    """`beta` >= 0 has no default: the published ones differ."""
    beta, advantages = config["beta"], inputs["advantages"]
    away = p - inputs["logprobs"]
    return policy_terms(
        p=p,
        mask=mask_of(p, inputs),
        ratio=torch.exp(away),
        value=-(advantages * p - 0.5 * beta * away.square()),
        coefficient=-(advantages - beta * away),
        clipped=torch.zeros_like(p),
        inputs=inputs,
    )
