"""A frozen linear layer, several fused into one, with the low-rank update in the GEMM's accumulator.

Base weights may be packed once for oneDNN (a private op of torch: probed, never relied on).
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from gristmill_worker.fast.threads import alone_if_small

log = logging.getLogger(__name__)

PACK_ROWS: Final = 1024
"""Row count that a packing is chosen for; others run on it as well."""

PROBE_ERRORS: Final = {torch.bfloat16: 0.1, torch.float32: 1e-4}
"""Of sums of 64 products of standard normals: more is not rounding. What is packed is of these dtypes."""


@dataclass(frozen=True, slots=True)
class Factors:
    """An adapter's part in one fused layer of P projections, in the base's dtype."""

    a: Tensor
    """(P r, in)."""
    b_t: Tensor
    """(P r, out): block diagonal, alpha / rank included."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows of a batch that one adapter serves: its factors of each fused layer."""

    rows: Tensor
    """(n,) their places in the batch."""
    factors: list[Factors]


@dataclass(frozen=True, slots=True)
class Low:
    """What the backward pass needs of the forward one."""

    x: Tensor
    low: Tensor
    """(T, P r) = x A^T."""


@dataclass(frozen=True, slots=True)
class Owed:
    """Of one layer's backward pass: what the gradients of its A and B are the products of."""

    x: Tensor
    low: Tensor
    dy: Tensor
    d_low: Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a stream that one adapter serves, in one layer, and where its gradient goes."""

    rows: slice
    factors: Factors
    into: list[tuple[Tensor, Tensor]] | None
    scale: float


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear gives what a plain one gives here."""
    if dtype not in PROBE_ERRORS:
        return False
    maker = torch.Generator().manual_seed(0)
    try:
        x, w, other = (
            torch.randn(size, generator=maker).to(dtype) for size in ((32, 64), (48, 64), (32, 48))
        )
        packed = torch.ops.mkldnn._reorder_linear_weight(w, PACK_ROWS)
        got = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, None, "add")
        expected = torch.addmm(other.double(), x.double(), w.double().t())
        return bool((got.double() - expected).abs().max() <= PROBE_ERRORS[dtype])
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log.info("packing_unavailable", extra={"error": str(error).splitlines()[0]})
        return False


class Linear:
    """y = W x + bias, W (out, in); `parts` are the output rows of the projections that it fuses."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...], *, pack: bool
    ) -> None:
        self.out, self.columns = weight.shape
        self.parts = parts
        self.bias = bias
        self.packed = pack
        self.weight = _reordered(weight) if pack else weight
        self.transposed = _reordered(weight.t().contiguous()) if pack else weight

    def plain(self, x: Tensor) -> Tensor:
        """(T, in) -> (T, out), without an adapter."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def forward(self, x: Tensor, factors: Factors | None) -> tuple[Tensor, Low | None]:
        if factors is None:
            return self.plain(x), None
        with self._small(x, factors):
            low = torch.mm(x, factors.a.t())
            update = torch.mm(low, factors.b_t)
        return self._add(update, x), Low(x, low)

    def forward_spans(self, x: Tensor, spans: Sequence[Span]) -> tuple[Tensor, list[Low]]:
        """Rows of several adapters, of any ranks: one base product, a low-rank one for each."""
        update = x.new_zeros(x.shape[0], self.out)
        lows = []
        for span in spans:
            own = x[span.rows]
            with self._small(own, span.factors):
                low = torch.mm(own, span.factors.a.t())
                update[span.rows] = torch.mm(low, span.factors.b_t)
            lows.append(Low(own, low))
        return self._add(update, x), lows

    def shared(self, x: Tensor, adapters: Sequence[Shared], layer: int) -> Tensor:
        """(B, in) -> (B, out), each row with its own adapter; those of none get the base alone."""
        if not adapters:
            return self.plain(x)
        if len(adapters) == 1 and adapters[0].rows.shape[0] == x.shape[0]:
            return self.forward(x, adapters[0].factors[layer])[0]
        update = x.new_zeros(x.shape[0], self.out)
        for each in adapters:
            own = each.factors[layer]
            with self._small(x, own):
                update[each.rows] = torch.mm(torch.mm(x[each.rows], own.a.t()), own.b_t)
        return self._add(update, x)

    def _add(self, update: Tensor, x: Tensor) -> Tensor:
        """update + x W^T + bias, rounded once: a bf16 result that is rounded first loses the update."""
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                x, update, self.weight, self.bias, "add"
            )
            return y
        if self.bias is not None:
            if x.dtype == torch.float32:
                return torch.addmm(update, x, self.weight.t()).add_(self.bias)
            return self._add_wide(update, x)
        return torch.addmm(update, x, self.weight.t())

    def _add_wide(self, update: Tensor, x: Tensor) -> Tensor:
        assert self.bias is not None
        wide = torch.mm(x, self.weight.t(), out_dtype=torch.float32) if x.is_cuda else (
            torch.nn.functional.linear(x.float(), self.weight.float())
        )  # fmt: skip
        return (wide + update.float() + self.bias.float()).to(x.dtype)

    def backward(
        self, dy: Tensor, saved: Low | None, factors: Factors | None,
        into: list[tuple[Tensor, Tensor]] | None, scale: float,
    ) -> Tensor:  # fmt: skip
        """dy (T, out) -> dx (T, in). Adds the gradients of A (r, in) and B (out_p, r) of each part."""
        if saved is None or factors is None or into is None:
            return self.back(dy)
        return self._back_add(self._low_back(dy, saved, factors, into, scale), dy)

    def backward_spans(self, dy: Tensor, saved: Sequence[Low], spans: Sequence[Span]) -> Tensor:
        """dy (T, out) -> dx (T, in). Adds to the gradient of each span that has one."""
        update = dy.new_zeros(dy.shape[0], self.columns)
        for span, low in zip(spans, saved, strict=True):
            update[span.rows] = self._low_back(
                dy[span.rows], low, span.factors, span.into, span.scale
            )
        return self._back_add(update, dy)

    def _low_back(
        self, dy: Tensor, saved: Low, factors: Factors,
        into: list[tuple[Tensor, Tensor]] | None, scale: float,
    ) -> Tensor:  # fmt: skip
        """The low-rank part of dx."""
        with self._small(dy, factors):
            d_low = torch.mm(dy, factors.b_t.t())
            if into is not None:
                d_a = torch.mm(d_low.t(), saved.x)
                at, rank = 0, saved.low.shape[1] // len(self.parts)
                for index, (rows, (a, b)) in enumerate(zip(self.parts, into, strict=True)):
                    columns = slice(index * rank, (index + 1) * rank)
                    a.add_(d_a[columns])
                    b.add_(torch.mm(dy[:, at : at + rows].t(), saved.low[:, columns]), alpha=scale)
                    at += rows
            return torch.mm(d_low, factors.a)

    def backward_owing(self, dy: Tensor, saved: Low, factors: Factors, owed: list[Owed]) -> Tensor:
        """As `backward`; what the gradients are made of is put on the list."""
        with self._small(dy, factors):
            d_low = torch.mm(dy, factors.b_t.t())
            update = torch.mm(d_low, factors.a)
        owed.append(Owed(saved.x, saved.low, dy, d_low))
        return self._back_add(update, dy)

    def _small(self, x: Tensor, factors: Factors) -> AbstractContextManager[None]:
        """Around the low-rank products of rows x."""
        flops = 2 * x.shape[0] * max(self.out, self.columns) * factors.a.shape[0]
        return alone_if_small(flops, x.device)

    def _back_add(self, update: Tensor, dy: Tensor) -> Tensor:
        """update + dy W, rounded once."""
        if self.packed:
            dx: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
                dy, update, self.transposed, None, "add"
            )
            return dx
        return torch.addmm(update, dy, self.weight)

    def back(self, dy: Tensor) -> Tensor:
        """dy (T, out) -> dx (T, in), without an adapter."""
        if self.packed:
            dx: Tensor = torch.ops.mkldnn._linear_pointwise(
                dy, self.transposed, None, "none", [], ""
            )
            return dx
        return torch.mm(dy, self.weight)


def _reordered(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return packed
