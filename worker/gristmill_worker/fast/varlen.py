"""All segments of a token stream in one call of torch's varlen attention: CUDA, 16 bits.

A young interface of torch: it is probed once on each device, and where it is missing or gives other
numbers, each run goes through the kernels that every device has.
"""

import logging
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from gristmill_worker.attended import Attended, attended
from gristmill_worker.runs import Run

log = logging.getLogger(__name__)

PROBE: Final = (Run(0, 40, 2), Run(80, 7, 1))
PROBE_TOLERANCE: Final = 3e-2
"""Relative. 16 bits keep 8 or 11; a wrong mask shows as a difference of order 1."""


def bounds_of(table: tuple[Run, ...], device: torch.device) -> Tensor:
    """(segments + 1,) int32: where each segment begins, and where the last one ends."""
    lengths = [run.length for run in table for _ in range(run.segments)]
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(device=device, dtype=torch.int32)


def attend(
    q: Tensor, k: Tensor, v: Tensor, table: tuple[Run, ...], *,
    window: int | None, scale: float, kernel: Any = None,
) -> Attended:  # fmt: skip
    """q (T, H, D), k and v (T, KV, D) -> (T, H, D). `kernel`: of varlen_attn's signature."""
    bounds, longest = bounds_of(table, q.device), max(run.length for run in table)
    return attended(
        kernel or _flash, q, k, v, cu_seq_q=bounds, cu_seq_k=bounds, max_q=longest, max_k=longest,
        window_size=(-1 if window is None else window - 1, 0), scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def _flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    # Not cuDNN's, which comes first where it is: its backward pass promises no fixed order.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = varlen_attn(q, k, v, **options)
    assert isinstance(out, Tensor)  # a pair only where more is asked for
    return out


@cache
def works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> bool:
    """Whether it gives here what plain attention gives, and twice the same gradients."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return probe(device, dtype, heads, kv_heads, size, None)


def probe(  # noqa: PLR0917
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, kernel: Any
) -> bool:
    """`kernel`: None = torch's."""  # Any: of varlen_attn's signature
    maker = torch.Generator().manual_seed(0)
    count = sum(run.length * run.segments for run in PROBE)
    q, k, v, d_out = (
        torch.randn(count, each, size, generator=maker).to(device, dtype)
        for each in (heads, kv_heads, kv_heads, heads)
    )
    try:
        for window in (None, 5):
            runs = [attend(q, k, v, PROBE, window=window, scale=0.2, kernel=kernel) for _ in "ab"]
            first, second = ([each.out, *each.backward(d_out)] for each in runs)
            plain = attended(_plain, q.double(), k.double(), v.double(), window=window, scale=0.2)
            expected = [plain.out, *plain.backward(d_out.double())]
            pairs = list(zip(first, second, expected, strict=True))
            if any(not torch.equal(a, b) or _far(a, c) for a, b, c in pairs):
                log.warning("varlen_attention_differs", extra={"window": window})
                return False
    except Exception as error:  # noqa: BLE001 - missing, or too new for the device: each in its own way
        log.info("varlen_attention_unavailable", extra={"error": str(error).splitlines()[:1]})
        return False
    return True


def _far(found: Tensor, expected: Tensor) -> bool:
    scale = expected.abs().max().clamp_min(1e-6)
    return bool(((found.double() - expected).abs().max() / scale) > PROBE_TOLERANCE)


def _plain(q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
    """The same over PROBE, by one masked product."""
    segment = torch.tensor(
        [at for at, n in enumerate([40, 40, 7]) for _ in range(n)], device=q.device
    )
    at = torch.arange(q.shape[0], device=q.device)
    back = at[:, None] - at[None, :]
    seen = (segment[:, None] == segment[None, :]) & (back >= 0)
    if window is not None:
        seen &= back < window
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("hij,jhd->ihd", p, v)
