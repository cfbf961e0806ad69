"""Picking the next token: temperature, then top_k, then top_p, then the inverse of the CDF."""

import torch
from torch import Tensor


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(B, V) float32 logits -> (B, V) float64 probabilities, 0 for what is cut off.

    temperature > 0; top_k -1 = off; top_p keeps the token that crosses it. Among equal logits
    the lower token id comes first.
    """
    z = logits.double() / temperature
    if top_k == -1 and top_p >= 1.0:
        return torch.softmax(z, dim=-1)
    ordered, ids = torch.sort(z, dim=-1, descending=True, stable=True)
    if 0 < top_k < z.shape[-1]:
        ordered[:, top_k:] = -torch.inf
    kept = torch.softmax(ordered, dim=-1)
    if top_p < 1.0:
        before = kept.cumsum(dim=-1) - kept
        kept = torch.where(before < top_p, kept, torch.zeros_like(kept))
        kept /= kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(z).scatter_(-1, ids, kept)


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """(B, V) and (B,) in [0, 1) -> (B,) ids. Never one whose probability is 0."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    ids = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)[:, 0]
    # Rounding may put the target on the very end of the sum.
    last = torch.searchsorted(cumulative, total)[:, 0]
    return torch.minimum(ids, last)
