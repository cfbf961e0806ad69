"""Causal attention over segments of a flat token stream, forward and backward.

Short segments by matrix products with the probabilities kept (key and value heads folded into the rows);
long ones by torch's fused kernel, which keeps a number for each row. A sliding window is a mask.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from gristmill_worker.attended import Attended, attended
from gristmill_worker.fast import varlen
from gristmill_worker.fast.kernels import Kernels, for_rows
from gristmill_worker.fast.shape import Shape
from gristmill_worker.runs import Run

MATMUL_LENGTH_MAX: Final = 512
"""Longer segments take the fused kernel: their probabilities would not fit the cache, nor the memory."""

SCORES_MAX: Final = 2**24
"""Scores held at once where a prompt's block looks back at what came before it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one run, for its backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None
    """Probabilities; None where the fused kernel ran."""
    out: Tensor
    lse: Tensor | None
    done: Attended | None = None
    """On CUDA, what torch itself makes the backward pass of; of the whole stream where q is (T, H, D)."""


@lru_cache(maxsize=64)
def mask_of(length: int, window: int | None, device: torch.device) -> Tensor:
    """(L, L): True where row i sees column j."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at[None, :]
    seen = back >= 0
    return seen if window is None else seen & (back < window)


def mask_behind(count: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """(n, P): what the newest n of P positions see. Not cached: each block of a prompt has its own."""
    at = torch.arange(length, device=device)
    back = at[length - count :, None] - at[None, :]
    seen = back >= 0
    return seen if window is None else seen & (back < window)


class Attention:
    """Of one layer's shape. q (T, H, D), k and v (T, KV, D) -> (T, H, D)."""

    def __init__(self, shape: Shape, kernels: Kernels) -> None:
        self.shape = shape
        self.kernels = kernels
        self.scale = shape.head_size**-0.5

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Run, ...], *,
        window: int | None, kept: list[Kept] | None,
    ) -> Tensor:  # fmt: skip
        """With `kept`, what the backward pass needs of each run is put there."""
        s = self.shape
        if varlen.works(q.device, q.dtype, s.heads, s.kv_heads, s.head_size):
            whole = varlen.attend(q, k, v, table, window=window, scale=self.scale)
            if kept is not None:
                kept.append(Kept(q, k, v, None, whole.out, None, whole))
            return whole.out
        out = torch.empty_like(q)
        for run in table:
            at = slice(run.start, run.start + run.length * run.segments)
            narrow = window if window is not None and window < run.length else None
            if run.length <= MATMUL_LENGTH_MAX or narrow is not None:
                own, saved = self._matmul(q[at], k[at], v[at], run, narrow)
            else:
                own, saved = self._fused(q[at], k[at], v[at], run)
            out[at] = own
            if kept is not None:
                kept.append(saved)
        return out

    def backward(self, d_out: Tensor, table: tuple[Run, ...], kept: list[Kept]) -> Tensor:
        """(T, H, D) -> gradients of q, k and v side by side: (T, H + 2 KV, D)."""
        shape = self.shape
        if kept[0].done is not None and kept[0].q.dim() == 3:
            return torch.cat(kept[0].done.backward(d_out), 1)
        both = d_out.new_empty(d_out.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_size)
        for run, own in zip(table, kept, strict=True):
            at = slice(run.start, run.start + run.length * run.segments)
            if own.p is None:
                self._fused_backward(d_out[at], run, own, both[at])
            else:
                self._matmul_backward(d_out[at], run, own, both[at])
        return both

    def behind(self, q: Tensor, keys: Tensor, values: Tensor, *, window: int | None) -> Tensor:
        """q (n, H, D) of the newest n of P positions, keys and values (KV, P, D) of all -> (n, H, D)."""
        s, (count, length) = self.shape, (q.shape[0], keys.shape[1])
        folded = (q * self.scale).view(count, s.kv_heads, s.group, s.head_size)
        folded = folded.permute(1, 2, 0, 3).reshape(s.kv_heads, s.group * count, s.head_size)
        mask = mask_behind(count, length, window, q.device)
        out = torch.empty_like(folded)
        heads = max(1, SCORES_MAX // (s.group * count * length))
        for at in range(0, s.kv_heads, heads):
            some = slice(at, at + heads)
            scores = torch.bmm(folded[some], keys[some].transpose(1, 2))
            p = self.kernels.softmax_forward(scores.view(-1, s.group, count, length), mask)
            out[some] = torch.bmm(p.view(-1, s.group * count, length), values[some])
        out = out.view(s.kv_heads, s.group, count, s.head_size)
        return out.permute(2, 0, 1, 3).reshape(q.shape).contiguous()

    # --- by matrix products: (segments * KV, group * L, D) ---------------------------------------

    def _folded(self, x: Tensor, run: Run) -> Tensor:
        """(n L, H, D) -> (n KV, group L, D)."""
        s = self.shape
        return (
            x.view(run.segments, run.length, s.kv_heads, s.group, s.head_size)
            .permute(0, 2, 3, 1, 4)
            .reshape(run.segments * s.kv_heads, s.group * run.length, s.head_size)
        )

    def _unfolded(self, x: Tensor, run: Run) -> Tensor:
        s = self.shape
        return (
            x.view(run.segments, s.kv_heads, s.group, run.length, s.head_size)
            .permute(0, 3, 1, 2, 4)
            .reshape(-1, s.heads, s.head_size)
        )

    def _kv(self, x: Tensor, run: Run) -> Tensor:
        """(n L, KV, D) -> (n KV, L, D)."""
        s = self.shape
        return (
            x.view(run.segments, run.length, s.kv_heads, s.head_size)
            .permute(0, 2, 1, 3)
            .reshape(run.segments * s.kv_heads, run.length, s.head_size)
        )

    def _un_kv(self, x: Tensor, run: Run) -> Tensor:
        s = self.shape
        return (
            x.view(run.segments, s.kv_heads, run.length, s.head_size)
            .permute(0, 2, 1, 3)
            .reshape(-1, s.kv_heads, s.head_size)
        )

    def _matmul(
        self, q: Tensor, k: Tensor, v: Tensor, run: Run, window: int | None
    ) -> tuple[Tensor, Kept]:
        s, length = self.shape, run.length
        qq, kk, vv = self._folded(q * self.scale, run), self._kv(k, run), self._kv(v, run)
        scores = torch.bmm(qq, kk.transpose(1, 2)).view(-1, s.group, length, length)
        p = for_rows(self.kernels, q).softmax_forward(scores, mask_of(length, window, q.device))
        p = p.view(-1, s.group * length, length)
        own = torch.bmm(p, vv)
        return self._unfolded(own, run), Kept(qq, kk, vv, p, own, None)

    def _matmul_backward(self, d_out: Tensor, run: Run, own: Kept, both: Tensor) -> None:
        s = self.shape
        assert own.p is not None
        d = self._folded(d_out, run)
        d_v = torch.bmm(own.p.transpose(1, 2), d)
        d_p = torch.bmm(d, own.v.transpose(1, 2))
        d_scores = for_rows(self.kernels, d_out).softmax_backward(own.p, d_p, d, own.out)
        both[:, : s.heads] = self._unfolded(torch.bmm(d_scores, own.k) * self.scale, run)
        d_k = torch.bmm(d_scores.transpose(1, 2), own.q)
        both[:, s.heads : s.heads + s.kv_heads] = self._un_kv(d_k, run)
        both[:, s.heads + s.kv_heads :] = self._un_kv(d_v, run)

    # --- by the fused kernel: (segments, H, L, D) ------------------------------------------------

    def _spread(self, x: Tensor, run: Run) -> Tensor:
        """(n L, KV, D) -> (n, H, L, D): each head beside the queries that share it."""
        s = self.shape
        wide = x.view(run.segments, run.length, s.kv_heads, 1, s.head_size)
        wide = wide.expand(-1, -1, -1, s.group, -1)
        return wide.reshape(run.segments, run.length, s.heads, s.head_size).transpose(1, 2)

    def _heads(self, x: Tensor, run: Run) -> Tensor:
        s = self.shape
        return x.view(run.segments, run.length, s.heads, s.head_size).transpose(1, 2)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, run: Run) -> tuple[Tensor, Kept]:
        qq, kk, vv = self._heads(q, run), self._spread(k, run), self._spread(v, run)
        if differentiated_by_torch(q):
            done = attended(_causal, qq, kk, vv)
            return done.out.transpose(1, 2).reshape(q.shape), Kept(
                qq, kk, vv, None, done.out, None, done
            )
        own, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            qq, kk, vv, 0.0, is_causal=True
        )
        return own.transpose(1, 2).reshape(q.shape), Kept(qq, kk, vv, None, own, lse)

    def _fused_backward(self, d_out: Tensor, run: Run, own: Kept, both: Tensor) -> None:
        s = self.shape
        if own.done is not None:
            d_q, d_k, d_v = own.done.backward(self._heads(d_out, run))
        else:
            d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                self._heads(d_out, run), own.q, own.k, own.v, own.out, own.lse, 0.0, True
            )
        shared = (run.segments * run.length, s.kv_heads, s.group, s.head_size)
        both[:, : s.heads] = d_q.transpose(1, 2).reshape(-1, s.heads, s.head_size)
        both[:, s.heads : s.heads + s.kv_heads] = d_k.transpose(1, 2).reshape(shared).sum(2)
        both[:, s.heads + s.kv_heads :] = d_v.transpose(1, 2).reshape(shared).sum(2)


def differentiated_by_torch(q: Tensor) -> bool:
    """Where torch has no fused kernel whose two passes can be called apart."""
    return q.is_cuda


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
