"""A frozen linear layer with the low-rank update of whichever adapter is selected.

y = W x + (alpha / r) B (A x). The update enters the accumulator of the base GEMM, so that the sum is
rounded once: a bf16 base layer that is rounded first swallows every update below half a unit in
the last place, and training stalls.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class LayerFactors(NamedTuple):
    """Compute copies of one layer, in the base model's dtype."""

    a: Tensor
    """(rank, in)."""
    b: Tensor
    """(out, rank), alpha / rank included."""


class LayerGradient(NamedTuple):
    """Views into a flat float32 gradient."""

    a: Tensor
    b: Tensor


class Slot:
    """What all wrapped layers of one base model use now: an adapter, and where its gradient goes."""

    def __init__(self, device: torch.device) -> None:
        self.factors: list[LayerFactors] | None = None
        self.gradient: list[LayerGradient] | None = None
        self.scale = 1.0
        # A graph needs one input that asks for a gradient; base weights and tokens do not.
        self.anchor = torch.zeros((), device=device, requires_grad=True)


class LoraLinear(nn.Module):
    """Takes the place of nn.Linear (weight (out, in)) or of transformers' Conv1D (weight (in, out))."""

    def __init__(self, base: nn.Module, slot: Slot, index: int) -> None:
        super().__init__()
        self.weight: nn.Parameter = base.weight  # type: ignore[assignment]
        self.bias: nn.Parameter | None = base.bias  # type: ignore[assignment]
        self.transposed = not isinstance(base, nn.Linear)
        self.slot = slot
        self.index = index
        self.widened: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.weight.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def matrix(self) -> Tensor:
        """(in, out), a view."""
        return self.weight if self.transposed else self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        factors = self.slot.factors
        if factors is None:
            y = _base(flat, self.matrix, self.bias)
        elif self.slot.gradient is None or not torch.is_grad_enabled():
            layer = factors[self.index]
            y = _with_update(flat, flat @ layer.a.t(), layer.b, self)
        else:
            y = _LoraFunction.apply(flat, self.slot.anchor, self)
        return y.view(*x.shape[:-1], y.shape[-1])

    def with_bias_column(self) -> Tensor:
        """(in + 8, out): the bias as one more input row; 8 keeps the GEMM's inner size aligned."""
        if self.widened is None:
            rows, columns = self.matrix.shape
            self.widened = self.matrix.new_zeros(rows + 8, columns)
            self.widened[:rows] = self.matrix
            if self.bias is not None:
                self.widened[rows] = self.bias
        return self.widened


def _base(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _with_update(x: Tensor, low: Tensor, b: Tensor, layer: LoraLinear) -> Tensor:
    """x (T, in), low = x A^T (T, r) -> (T, out), rounded once."""
    update = torch.mm(low, b.t())
    if layer.bias is None:
        return torch.addmm(update, x, layer.matrix)
    if x.dtype == torch.float32:
        return torch.addmm(update, x, layer.matrix).add_(layer.bias)
    ones = x.new_zeros(x.shape[0], 8)
    ones[:, 0] = 1
    return torch.addmm(update, torch.cat([x, ones], dim=1), layer.with_bias_column())


class _LoraFunction(torch.autograd.Function):
    """Adds the adapter's gradient to the slot's buffer itself; the base weight gets none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, layer: LoraLinear) -> Tensor:
        factors = layer.slot.factors
        assert factors is not None
        a, b = factors[layer.index]
        low = torch.mm(x, a.t())
        ctx.save_for_backward(x, low)
        ctx.layer, ctx.a, ctx.b = layer, a, b
        return _with_update(x, low, b, layer)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, None]:
        (dy,) = upstream
        x, low = ctx.saved_tensors
        layer: LoraLinear = ctx.layer
        gradient = layer.slot.gradient
        assert gradient is not None
        into = gradient[layer.index]
        d_low = torch.mm(dy, ctx.b)
        into.b.add_(torch.mm(dy.t(), low), alpha=layer.slot.scale)
        into.a.add_(torch.mm(d_low.t(), x))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.addmm(torch.mm(d_low, ctx.a), dy, layer.matrix.t())
        return dx, None, None
