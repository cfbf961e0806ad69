"""L = -sum w p."""

from torch import Tensor

from gristmill_worker.losses.terms import TokenTerms, masked


def cross_entropy(p: Tensor, inputs: dict[str, Tensor], _config: dict[str, float]) -> TokenTerms:
    """`weights` are any finite numbers, negative ones too. p and weights (R, K): K targets a token."""
    weights = inputs["weights"]
    return TokenTerms(value=masked(weights, -weights * p), coefficient=-weights)
