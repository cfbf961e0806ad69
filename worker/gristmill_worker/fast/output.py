"""The fast path's output layer."""

from dataclasses import dataclass

from torch import Tensor

from gristmill_worker.fast.linear import Linear
from gristmill_worker.head import Head


@dataclass(frozen=True, slots=True)
class _Plain:
    """What a Head is made from."""

    weight: Tensor
    bias: None = None


class PackedHead(Head):
    """Its weight once more as oneDNN wants it, and once turned for the backward pass."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(_Plain(weight), 1.0, None)
        self.layer = Linear(weight, None, (weight.shape[0],), pack=True)

    def product(self, hidden: Tensor) -> Tensor:
        return self.layer.plain(hidden)

    def product_back(self, d_product: Tensor) -> Tensor:
        return self.layer.back(d_product)


def head_of(weight: Tensor, *, pack: bool) -> Head:
    """`weight` (V, h), without a bias. In bf16 packing gains nothing here: the product is a large one."""
    return PackedHead(weight) if pack else Head(_Plain(weight), 1.0, None)
