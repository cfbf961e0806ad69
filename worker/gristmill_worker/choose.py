"""Picking the next token: temperature, then top_k, then top_p, then the inverse of the CDF."""

from typing import Final

import torch
from torch import Tensor

TEMPERATURE_MIN: Final = 1e-30
"""Lower ones would be 0 in float32; the choice is as good as greedy long before."""
BLOCK: Final = 256
"""Weights that are summed up at once, where nothing is cut off."""


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(B, V) float32 logits -> (B, V) float64 probabilities, 0 for what is cut off.

    temperature > 0; top_k -1 = off; top_p keeps the token that crosses it. Among equal logits
    the lower token id comes first.
    """
    z = logits.double() / max(temperature, TEMPERATURE_MIN)
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


def draw(logits: Tensor, temperature: float, uniforms: Tensor) -> Tensor:
    """(B, V) float32 logits, (B,) in [0, 1) -> (B,) ids: as `pick` of an uncut `distribution`, but faster.

    Weights are float32, their sums float64, and only the block that the target falls into is summed
    token by token.
    """
    below = logits - logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(below if temperature == 1.0 else below / max(temperature, TEMPERATURE_MIN))
    spare = -weights.shape[1] % BLOCK
    if spare:
        weights = torch.nn.functional.pad(weights, (0, spare))
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniforms[:, None] * sums[:, -1:]
    block = _first_above(sums, target)
    rows = torch.arange(len(block), device=block.device)
    before = torch.where(block > 0, sums[rows, block - 1], 0.0)
    inside = blocks[rows, block].double().cumsum(dim=-1)
    found = block * BLOCK + _first_above(inside, target - before[:, None])
    return found.clamp_(max=logits.shape[1] - 1) if spare else found


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """(B, n) growing and (B, 1) -> (B,) the first place above the target, and never one that adds nothing.

    Of a row that is not finite: any place in it, for one that is not there would fail the whole batch.
    """
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put the target on the very end of the sum.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(found, last).clamp_(max=cumulative.shape[1] - 1)


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """(B, V) and (B,) in [0, 1) -> (B,) ids. Never one whose probability is 0."""
    cumulative = probabilities.cumsum(dim=-1)
    return _first_above(cumulative, uniforms[:, None] * cumulative[:, -1:])
