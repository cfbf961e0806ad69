"""L = -sum m min(r A, clip(r, low, high) A): pessimistic, so a worse ratio is never hidden."""

import torch
from torch import Tensor

from gristmill_worker.losses.terms import TokenTerms, clip_bounds, mask_of, policy_terms


def ppo(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float]) -> TokenTerms:
    low, high = clip_bounds(config)
    mask = mask_of(p, inputs)
    ratio = torch.exp(p - inputs["logprobs"])
    gain = ratio * inputs["advantages"]
    clipped_gain = ratio.clamp(low, high) * inputs["advantages"]
    clipped = clipped_gain < gain
    return policy_terms(
        p=p,
        mask=mask,
        ratio=ratio,
        value=-torch.minimum(gain, clipped_gain),
        coefficient=torch.where(clipped, torch.zeros_like(gain), -gain),
        clipped=clipped,
        inputs=inputs,
    )
