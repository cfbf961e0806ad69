"""Attention over a packed row: several datums in one flat token stream, none sees another.

Registered in transformers under ATTENTION. Without an active table it is transformers' own SDPA.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from gristmill_worker.attended import sdpa
from gristmill_worker.runs import Run

ATTENTION: Final = "gristmill_segments"


_ACTIVE: ContextVar[tuple[Run, ...] | None] = ContextVar("segments", default=None)


@contextmanager
def segments(table: tuple[Run, ...]) -> Iterator[None]:
    """Within it, the one row of a batch is read as these segments."""
    token = _ACTIVE.set(table)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def register() -> None:
    """Make ATTENTION known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:  # Any: transformers' own signature
    return None if _ACTIVE.get() is not None else sdpa_mask(*args, **kwargs)


def _attention(  # noqa: PLR0917 - transformers passes the first five by position
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query (1, H, T, D), key and value (1, KV, T, D) -> (1, T, H, D)."""
    table = _ACTIVE.get()
    if table is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name)]
    if unknown:
        raise ValueError(f"packed attention does not know {', '.join(unknown)}")
    window: int | None = options.get("sliding_window")
    parts = [_run_attention(run, (query, key, value), scaling, window) for run in table]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _run_attention(
    run: Run,
    heads: tuple[Tensor, Tensor, Tensor],
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """(1, segments * length, H, D)."""
    q, k, v = (_unfold(tensor, run) for tensor in heads)
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = (tensor.repeat_interleave(repeat, dim=1) for tensor in (k, v))
    mask = _band(run.length, window, q.device) if window and window < run.length else None
    out = sdpa(q, k, v, mask=mask, scale=scaling)
    return out.transpose(1, 2).reshape(1, run.segments * run.length, q.shape[1], v.shape[-1])


def _unfold(tensor: Tensor, run: Run) -> Tensor:
    """(1, heads, T, D) -> (segments, heads, length, D)."""
    part = tensor[0, :, run.start : run.start + run.segments * run.length]
    return part.view(part.shape[0], run.segments, run.length, part.shape[-1]).transpose(0, 1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """True where position i may see j: j <= i and i - j < window."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    return (back >= 0) & (back < window)
