"""L = -sum m sg(clip(r, low, high)) A p: the clipped ratio weighs, and carries no gradient."""

import torch
from torch import Tensor

from gristmill_worker.losses.terms import TokenTerms, clip_bounds, mask_of, policy_terms


def cispo(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float]) -> TokenTerms:
    low, high = clip_bounds(config)
    mask = mask_of(p, inputs)
    ratio = torch.exp(p - inputs["logprobs"])
    weight = ratio.clamp(low, high) * inputs["advantages"]
    return policy_terms(
        p=p,
        mask=mask,
        ratio=ratio,
        value=-weight * p,
        coefficient=-weight,
        clipped=(ratio < low) | (ratio > high),
        inputs=inputs,
    )
