"""Elementwise kernels of the decoder, forward and backward; compiled where there is a compiler.

All take and give the base's dtype and reckon in float32. Only these are compiled: a whole model takes a
minute and more to compile and gains little over its matrix products.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

log = logging.getLogger(__name__)

VARIANTS_MAX: Final = 64
"""Compiled variants of one kernel; token counts are dynamic, so that a few are enough."""

PROBE_ROWS: Final = 1023
"""As many as a usual pass has, and odd: what is compiled for two equal sizes serves no others."""


def rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (T, h), weight (h,) -> normed (T, h) and 1 / rms (T, 1) float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight, scale


def rms_backward(
    upstream: Tensor, x: Tensor, weight: Tensor, scale: Tensor, residual: Tensor
) -> Tensor:
    """Gradient of x, with the residual's gradient added."""
    g = upstream.float() * weight.float()
    normed = x.float() * scale
    own = (g - normed * (g * normed).mean(-1, keepdim=True)) * scale
    return (own + residual.float()).to(x.dtype)


def swiglu_forward(both: Tensor) -> Tensor:
    """(T, 2 f): gate and up side by side -> (T, f)."""
    gate, up = both.chunk(2, -1)
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(both.dtype)


def swiglu_backward(upstream: Tensor, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    g, d = gate.float(), upstream.float()
    s = torch.sigmoid(g)
    d_gate = d * up.float() * s * (1 + g * (1 - s))
    return torch.cat([d_gate.to(both.dtype), (d * g * s).to(both.dtype)], -1)


def rope_forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (T, H, D); cos and sin (T, 1, D / 2) float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def rope_backward(upstream: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = upstream.float().chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1).to(upstream.dtype)


def softmax_forward(scores: Tensor, mask: Tensor) -> Tensor:
    """scores (n, R, L, L), mask (L, L) True where seen."""
    wide = scores.float().masked_fill(~mask, -torch.inf)
    return torch.softmax(wide, -1).to(scores.dtype)


def softmax_backward(p: Tensor, d_p: Tensor, d_out: Tensor, out: Tensor) -> Tensor:
    """Gradient of the scores. sum_j p_j dp_j is d_out . out, which is cheaper."""
    dot = (d_out.float() * out.float()).sum(-1, keepdim=True)
    return (p.float() * (d_p.float() - dot)).to(p.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The same functions, compiled or not. `mode` belongs into the execution fingerprint."""

    mode: str
    rms_forward: Callable[..., tuple[Tensor, Tensor]]
    rms_backward: Callable[..., Tensor]
    swiglu_forward: Callable[..., Tensor]
    swiglu_backward: Callable[..., Tensor]
    rope_forward: Callable[..., Tensor]
    rope_backward: Callable[..., Tensor]
    softmax_forward: Callable[..., Tensor]
    softmax_backward: Callable[..., Tensor]


def _all(mode: str, wrap: Callable[[Any], Any]) -> Kernels:  # Any: functions of several shapes
    return Kernels(
        mode=mode,
        rms_forward=wrap(rms_forward), rms_backward=wrap(rms_backward),
        swiglu_forward=wrap(swiglu_forward), swiglu_backward=wrap(swiglu_backward),
        rope_forward=wrap(rope_forward), rope_backward=wrap(rope_backward),
        softmax_forward=wrap(softmax_forward), softmax_backward=wrap(softmax_backward),
    )  # fmt: skip


EAGER: Final = _all("eager", lambda function: function)

FEW_ROWS: Final = 64
"""Up to here torch's operators run on the calling thread; a compiled kernel wakes the others for microseconds."""


def for_rows(kernels: Kernels, x: Tensor) -> Kernels:
    """What suits a stream of these rows. It follows from their count, so that runs have the same bits."""
    few = x.shape[0] <= FEW_ROWS and x.device.type == "cpu"
    return _for_few(kernels) if few else kernels


@cache
def _for_few(kernels: Kernels) -> Kernels:
    """Of all, the MLP's have the most steps, over the widest rows."""
    return replace(
        EAGER, mode=kernels.mode, swiglu_forward=kernels.swiglu_forward,
        swiglu_backward=kernels.swiglu_backward,
    )  # fmt: skip


def compiled(dtype: torch.dtype, device: torch.device, inner: int) -> Kernels:
    """Compiled at their first call; EAGER, with a line in the log, where that does not work.

    One is compiled now, to see: as the decoder will call it, so that it is not done twice.
    """
    try:
        import torch._dynamo as dynamo

        dynamo.config.recompile_limit = VARIANTS_MAX
        kernels = _all("compiled", lambda function: torch.compile(function, dynamic=True))
        with torch.no_grad():
            kernels.swiglu_forward(torch.zeros(PROBE_ROWS, 2 * inner, dtype=dtype, device=device))
    except Exception as error:  # noqa: BLE001 - no compiler, or one that fails: each in its own way
        log.warning("kernels_not_compiled", extra={"error": str(error).splitlines()[0]})
        return EAGER
    return kernels
