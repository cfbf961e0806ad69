"""Attention by torch's own kernels, whose backward pass gives the same bits in every run.

Needed on CUDA alone: there the fused kernels add up gradients in whatever order threads end, unless
deterministic algorithms are insisted on while the backward pass runs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill_worker.devices import strictly


@dataclass(frozen=True, slots=True)
class Attended:
    """A forward pass, and torch's graph of it."""

    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    """As the caller's own graph may use it: detached."""
    graph: Tensor

    def backward(self, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the inputs. Once."""
        with strictly():
            d_q, d_k, d_v = torch.autograd.grad(self.graph, self.inputs, d_out)
        return d_q, d_k, d_v


def attended(kernel: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Attended:
    """Run `kernel(q, k, v, **options)` on inputs of its own."""  # Any: of several signatures
    inputs = (
        q.detach().requires_grad_(),
        k.detach().requires_grad_(),
        v.detach().requires_grad_(),
    )
    with torch.enable_grad():
        graph = kernel(*inputs, **options)
    return Attended(inputs, graph.detach(), graph)


class _SdpaFunction(torch.autograd.Function):
    """scaled_dot_product_attention as one node, its backward pass under `strictly`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.done = attended(torch.nn.functional.scaled_dot_product_attention, q, k, v, **options)
        out: Tensor = ctx.done.out
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.done.backward(upstream[0]), None)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float | None) -> Tensor:
    """q, k and v (n, H, L, D) -> (n, H, L, D); causal where there is no mask."""
    options = {"attn_mask": mask, "is_causal": mask is None, "scale": scale}
    if q.is_cuda and torch.is_grad_enabled() and q.requires_grad:
        out: Tensor = _SdpaFunction.apply(q, k, v, options)
        return out
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
