"""L = -sum m r A with r = exp(p - q). No clip, no KL, no mean."""

import torch
from torch import Tensor

from gristmill_worker.losses.terms import TokenTerms, mask_of, policy_terms


def importance_sampling(
    p: Tensor, inputs: dict[str, Tensor], _config: dict[str, float]
) -> TokenTerms:
    mask = mask_of(p, inputs)
    ratio = torch.exp(p - inputs["logprobs"])
    gain = ratio * inputs["advantages"]
    return policy_terms(
        p=p,
        mask=mask,
        ratio=ratio,
        value=-gain,
        coefficient=-gain,
        clipped=torch.zeros_like(p),
        inputs=inputs,
    )
