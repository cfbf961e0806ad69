"""The output layer, as a function of hidden rows, with its own backward."""

from typing import Any, Final

import torch
from torch import Tensor

from gristmill_contracts.errors import InvalidRequestError

ROWS_MIN: Final = 16
"""Fewer rows take other GEMM kernels, whose last bits differ; a few spare rows cost nothing."""


class Head:
    """Logits of hidden rows: z = cap * tanh(scale * (h W^T + bias) / cap), cap and scale where configured."""

    def __init__(self, layer: Any, scale: float, softcap: float | None) -> None:
        self.weight: Tensor = layer.weight
        self.bias: Tensor | None = getattr(layer, "bias", None)
        self.scale = scale
        self.softcap = softcap

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, h) in the base's dtype -> (R, V) float32."""
        rows = hidden.shape[0]
        if rows < ROWS_MIN:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, ROWS_MIN - rows))
        return self.decode_logits(hidden)[:rows]

    def decode_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`, without spare rows: for one token at a time, where they would cost."""
        z = self.product(hidden).float()
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z

    def backward(self, d_logits: Tensor, logits: Tensor) -> Tensor:
        """Gradient of the hidden rows, in the base's dtype. `d_logits` (R, V) float32 is overwritten."""
        if self.softcap is not None:
            d_logits *= 1 - (logits / self.softcap).square()
        if self.scale != 1.0:
            d_logits *= self.scale
        return self.product_back(d_logits.to(self.weight.dtype))

    def product(self, hidden: Tensor) -> Tensor:
        """(R, h) -> (R, V), both in the base's dtype."""
        return torch.nn.functional.linear(hidden, self.weight, self.bias)

    def product_back(self, d_product: Tensor) -> Tensor:
        """(R, V) -> (R, h)."""
        return torch.mm(d_product, self.weight)


def make_head(model: Any) -> Head:
    """Raises InvalidRequestError if the model has no output layer to call on its own."""
    layer = model.get_output_embeddings()
    if layer is None:
        raise InvalidRequestError(f"{type(model).__name__} has no output embeddings to score with")
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Head(layer, scale / divisor, getattr(config, "final_logit_softcapping", None))
