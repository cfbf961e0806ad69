"""What a loss says of each token."""

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

CLIP_LOW_DEFAULT: Final = 0.8
CLIP_HIGH_DEFAULT: Final = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """`value` and `coefficient` = dL/dp have p's shape; 0 where the weight is 0, whatever the inputs.

    `sums`: statistics summed over the tokens whose weight is not 0, to be divided by `count`.
    """

    value: Tensor
    coefficient: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    count: Tensor | None = None


def masked(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where the mask is not 0, else 0: unlike a product, safe with infinities and NaN."""
    return torch.where(mask != 0, values, torch.zeros_like(values))


def mask_of(p: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """The `weights` of an RL loss; 1 for all tokens if there are none."""
    weights = inputs.get("weights")
    return torch.ones_like(p) if weights is None else weights


def clip_bounds(config: dict[str, float]) -> tuple[float, float]:
    """Absolute bounds of the ratio."""
    low = config.get("clip_low_threshold", CLIP_LOW_DEFAULT)
    return low, config.get("clip_high_threshold", CLIP_HIGH_DEFAULT)


def policy_terms(
    *,
    p: Tensor,
    mask: Tensor,
    ratio: Tensor,
    value: Tensor,
    coefficient: Tensor,
    clipped: Tensor,
    inputs: dict[str, Tensor],
) -> TokenTerms:
    """Terms of a policy-gradient loss; value and coefficient come without the mask's factor."""
    sums = {
        "ratio": masked(mask, ratio).sum(dtype=torch.float64),
        "clip": masked(mask, clipped.to(p.dtype)).sum(dtype=torch.float64),
        "kl_q_p": masked(mask, inputs["logprobs"] - p).sum(dtype=torch.float64),
    }
    if "ref_log_prob" in inputs:
        sums["kl_p_ref"] = masked(mask, p - inputs["ref_log_prob"]).sum(dtype=torch.float64)
    return TokenTerms(
        value=masked(mask, mask * value),
        coefficient=masked(mask, mask * coefficient),
        sums=sums,
        count=(mask != 0).sum(),
    )
