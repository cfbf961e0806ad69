"""Forward and backward passes of the whole decoder over a flat token stream."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gristmill_worker.fast.attention import Attention, Kept
from gristmill_worker.fast.cache import FastCache
from gristmill_worker.fast.kernels import Kernels, for_rows
from gristmill_worker.fast.linear import Factors, Linear, Owed, Shared, Span
from gristmill_worker.fast.owed import owed_bytes, owed_columns, pay
from gristmill_worker.fast.rope import Rope
from gristmill_worker.fast.seats import Seats
from gristmill_worker.fast.shape import Shape
from gristmill_worker.fast.weights import Block, Weights, fused_layers
from gristmill_worker.runs import Run

Parts = list[tuple[Tensor, Tensor]]
"""Views (A, B) of each projection of one fused layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The adapter of a pass: its factors of each fused layer, and where its gradient goes.

    Or several, each with its own consecutive rows, one after another until the stream's end.
    """

    factors: list[Factors] | None = None
    gradient: list[Parts] | None = None
    scale: float = 1.0
    spans: tuple[tuple[slice, "Selected"], ...] = ()

    @property
    def rank(self) -> int:
        """The highest of those that have a gradient; 0 = none has."""
        if self.spans:
            return max(each.rank for _, each in self.spans)
        return 0 if self.gradient is None else self.gradient[0][0][0].shape[0]

    def forward(self, linear: Linear, x: Tensor, index: int) -> tuple[Tensor, Any]:
        """The output of a fused layer, and what `backward` needs of it."""
        if self.spans:
            return linear.forward_spans(x, self._spans(index))
        return linear.forward(x, self.of(index))

    def backward(
        self, linear: Linear, dy: Tensor, low: Any, index: int, owed: list[Owed] | None
    ) -> Tensor:
        """The gradient of the layer's input. Those of the factors are added, or put on the list `owed`."""
        if self.spans:
            return linear.backward_spans(dy, low, self._spans(index))
        if owed is not None and self.factors is not None:
            return linear.backward_owing(dy, low, self.factors[index], owed)
        return linear.backward(dy, low, self.of(index), self.into(index), self.scale)

    def _spans(self, index: int) -> list[Span]:
        return [
            Span(rows, each.factors[index], each.into(index), each.scale)
            for rows, each in self.spans
            if each.factors is not None
        ]

    def of(self, index: int) -> Factors | None:
        return None if self.factors is None else self.factors[index]

    def into(self, index: int) -> Parts | None:
        return None if self.gradient is None else self.gradient[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over a token stream."""

    table: tuple[Run, ...]
    turn: tuple[Tensor, Tensor]
    """Cosines and sines of the tokens' positions."""
    selected: Selected
    caches: tuple[FastCache, ...] = ()
    """Where the keys and values of each segment go; what a single one holds already comes before it."""


@dataclass(slots=True)
class Saved:
    """Of one block, for its backward pass. Nothing but `x` where the block runs again there."""

    x: Tensor
    middle: Tensor = field(init=False)
    scales: tuple[Tensor, Tensor] = field(init=False)
    lows: list[Any] = field(default_factory=list)
    """Of each fused layer, as its `Selected` gave it."""
    attention: list[Kept] = field(default_factory=list)
    both: Tensor = field(init=False)
    heads: Tensor | None = None
    head_scales: tuple[Tensor, Tensor] | None = None


class Decoder:
    """Stateless but for its weights: everything of a pass is in its arguments."""

    def __init__(self, shape: Shape, weights: Weights, rope: Rope, kernels: Kernels) -> None:
        self.shape = shape
        self.weights = weights
        self.rope = rope
        self.kernels = kernels
        self.attention = Attention(shape, kernels)
        self.fused = fused_layers(shape)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, table: tuple[Run, ...], selected: Selected, tape: list[Any] | None,
        kept: int | None = None,
    ) -> Tensor:  # fmt: skip
        """(T,) tokens -> (T, h) behind the final norm. With `tape`, what `backward` needs is put there.

        Of the last `kept` blocks (None: of all) everything; of those before them the input alone, from
        which the backward pass runs them again, to the same bits.
        """
        x = self.weights.embedding[tokens]
        this = self._pass(table, tokens.device, selected)
        first = 0 if kept is None else self.shape.layers - kept
        for index in range(self.shape.layers):
            saved = None if tape is None else Saved(x)
            x = self._block(x, index, this, saved if index >= first else None)
            if tape is not None:
                tape.append(saved)
        k = for_rows(self.kernels, x)
        out, scale = k.rms_forward(x, self.weights.final_norm, self.shape.eps)
        if tape is not None:
            tape.append((x, scale, this))
        return out

    def _pass(self, table: tuple[Run, ...], device: torch.device, selected: Selected) -> Pass:
        turn = self.rope.at(positions_of(table, device), max(run.length for run in table))
        return Pass(table=table, turn=turn, selected=selected)

    def _block(self, x: Tensor, index: int, this: Pass, saved: Saved | None) -> Tensor:
        block, at, selected = self.weights.blocks[index], 4 * index, this.selected
        k = for_rows(self.kernels, x)
        normed, scale_1 = k.rms_forward(x, block.before_attention, self.shape.eps)
        qkv, low_1 = selected.forward(block.qkv, normed, at)
        q, key, value = self.split(qkv, block, this.turn, saved)
        seen = self._look_back(q, key, value, index, this, saved)
        added, low_2 = selected.forward(block.out, seen.view(x.shape[0], -1), at + 1)
        middle = x + added
        normed, scale_2 = k.rms_forward(middle, block.before_mlp, self.shape.eps)
        both, low_3 = selected.forward(block.gate_up, normed, at + 2)
        added, low_4 = selected.forward(block.down, k.swiglu_forward(both), at + 3)
        if saved is not None:
            saved.middle, saved.both = middle, both
            saved.scales = (scale_1, scale_2)
            saved.lows = [low_1, low_2, low_3, low_4]
        return middle + added

    def split(
        self, qkv: Tensor, block: Block, turn: tuple[Tensor, Tensor], saved: Saved | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(T, q + 2 kv) -> q (T, H, D), k and v (T, KV, D); q and k normed where they are, and turned."""
        s, kernels = self.shape, for_rows(self.kernels, qkv)
        heads = qkv.view(-1, s.heads + 2 * s.kv_heads, s.head_size)
        turned = heads[:, : s.heads + s.kv_heads]
        if block.q_norm is not None and block.k_norm is not None:
            if saved is not None:
                saved.heads = heads
            q, scale_q = kernels.rms_forward(heads[:, : s.heads], block.q_norm, s.eps)
            k, scale_k = kernels.rms_forward(
                heads[:, s.heads : s.heads + s.kv_heads], block.k_norm, s.eps
            )
            turned = torch.cat([q, k], 1)
            if saved is not None:
                saved.head_scales = (scale_q, scale_k)
        turned = kernels.rope_forward(turned, *turn)
        return turned[:, : s.heads], turned[:, s.heads :], heads[:, s.heads + s.kv_heads :]

    def _look_back(  # noqa: PLR0917
        self, q: Tensor, key: Tensor, value: Tensor, index: int, this: Pass, saved: Saved | None
    ) -> Tensor:
        window = self.weights.blocks[index].window
        if this.caches:
            lengths = lengths_of(this.table)
            parts = (torch.split(tensor, lengths) for tensor in (key, value))
            each = zip(this.caches, *parts, strict=True)
            whole = [cache.put_prompt(index, k, v) for cache, k, v in each]
            if this.caches[0].prefix_length:
                return self.attention.behind(q, *whole[0], window=window)
        kept = None if saved is None else saved.attention
        return self.attention.forward(q, key, value, this.table, window=window, kept=kept)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, cache: FastCache, selected: Selected) -> Tensor:
        """(n,) next tokens of a prompt, behind those that the cache holds -> (n, h)."""
        x = self.weights.embedding[tokens]
        start, count = cache.prefix_length, tokens.shape[0]
        cache.prompt_room(count, x)
        positions = torch.arange(start, start + count, device=tokens.device)
        turn = self.rope.at(positions, start + count)
        table = (Run(0, count, 1),)
        return self._fill(x, Pass(table=table, turn=turn, selected=selected, caches=(cache,)))

    @torch.no_grad()
    def prefill_each(
        self,
        tokens: Tensor,
        table: tuple[Run, ...],
        caches: Sequence[FastCache],
        selected: Selected,
    ) -> Tensor:
        """(T,) whole prompts, each a segment with an empty cache of its own -> (T, h)."""
        x = self.weights.embedding[tokens]
        for cache, count in zip(caches, lengths_of(table), strict=True):
            cache.prompt_room(count, x)
        return self._fill(x, replace(self._pass(table, x.device, selected), caches=tuple(caches)))

    def _fill(self, x: Tensor, this: Pass) -> Tensor:
        for index in range(self.shape.layers):
            x = self._block(x, index, this, None)
        for cache, count in zip(this.caches, lengths_of(this.table), strict=True):
            cache.prefix_length += count
        return self.kernels.rms_forward(x, self.weights.final_norm, self.shape.eps)[0]

    @torch.no_grad()
    def step(self, tokens: Tensor, seats: Seats, adapters: Sequence[Shared]) -> Tensor:
        """(B,) next tokens -> (B, h). What each seat holds grows once the caller says so."""
        k, s = self.kernels, self.shape
        x = self.weights.embedding[tokens]
        seats.open(x)
        turn = self.rope.at(seats.positions, int(seats.positions.max()) + 1)
        for index, block in enumerate(self.weights.blocks):
            own = 4 * index
            normed, _ = k.rms_forward(x, block.before_attention, s.eps)
            qkv = block.qkv.shared(normed, adapters, own)
            q, key, value = self.split(qkv, block, turn, None)
            seen = seats.attend(index, q * self.attention.scale, key, value, block.window)
            x = x + block.out.shared(seen.reshape(x.shape[0], -1), adapters, own + 1)
            normed, _ = k.rms_forward(x, block.before_mlp, s.eps)
            both = block.gate_up.shared(normed, adapters, own + 2)
            x = x + block.down.shared(k.swiglu_forward(both), adapters, own + 3)
        return k.rms_forward(x, self.weights.final_norm, s.eps)[0]

    @torch.no_grad()
    def backward(self, d_out: Tensor, tape: list[Any]) -> None:
        """Add to the selected adapter's gradient. Empties the tape, so that memory goes as it is used."""
        x, scale, this = tape.pop()
        d = for_rows(self.kernels, x).rms_backward(
            d_out, x, self.weights.final_norm, scale, torch.zeros_like(d_out)
        )
        owed = self._debts(this.selected, tape)
        for index in reversed(range(self.shape.layers)):
            saved = tape.pop()
            if not saved.lows:
                self._block(saved.x, index, this, saved)
            d = self._block_backward(d, index, this, saved, owed)
        if owed is not None:
            self._pay(owed, this.selected)

    def _debts(self, selected: Selected, tape: list[Any]) -> tuple[list[Owed], ...] | None:
        """An empty list for each of a block's fused layers, where the pass is a short one of one adapter.

        It depends on sizes alone: whether layers run again may change no bits.
        """
        if selected.gradient is None:
            return None
        rows, item = tape[0].x.shape[0], tape[0].x.element_size()
        columns = owed_columns(self.fused, selected.rank)
        owes = owed_bytes(rows, self.shape.layers, columns, item) > 0
        return ([], [], [], []) if owes else None

    def _pay(self, owed: tuple[list[Owed], ...], selected: Selected) -> None:
        assert selected.gradient is not None
        for layer, (own, fused) in enumerate(zip(owed, self.fused, strict=True)):
            # The backward pass came to the last block first.
            into = selected.gradient[layer :: len(owed)][::-1]
            pay(own, fused.parts, into, selected.scale)

    def _block_backward(
        self, d: Tensor, index: int, this: Pass, saved: Saved, owed: tuple[list[Owed], ...] | None
    ) -> Tensor:
        block, at, selected = self.weights.blocks[index], 4 * index, this.selected
        k, s = for_rows(self.kernels, d), self.shape
        scale_1, scale_2 = saved.scales

        def back(layer: int, dy: Tensor) -> Tensor:
            own = None if owed is None else owed[layer]
            return selected.backward(block.linears[layer], dy, saved.lows[layer], at + layer, own)

        g = k.swiglu_backward(back(3, d), saved.both)
        d = k.rms_backward(back(2, g), saved.middle, block.before_mlp, scale_2, d)
        g = back(1, d).view(-1, s.heads, s.head_size)
        both = self.attention.backward(g, this.table, saved.attention)
        split = s.heads + s.kv_heads
        both[:, :split] = k.rope_backward(both[:, :split], *this.turn)
        if saved.heads is not None and saved.head_scales is not None:
            self._norms_backward(both, block, saved.heads, saved.head_scales)
        g = back(0, both.view(both.shape[0], -1))
        return k.rms_backward(g, saved.x, block.before_attention, scale_1, d)

    def _norms_backward(
        self, both: Tensor, block: Block, heads: Tensor, scales: tuple[Tensor, Tensor]
    ) -> None:
        s = self.shape
        q, key = slice(0, s.heads), slice(s.heads, s.heads + s.kv_heads)
        for at, weight, scale in ((q, block.q_norm, scales[0]), (key, block.k_norm, scales[1])):
            part = both[:, at]
            both[:, at] = for_rows(self.kernels, part).rms_backward(
                part, heads[:, at], weight, scale, torch.zeros_like(part)
            )


def lengths_of(table: tuple[Run, ...]) -> list[int]:
    """Of each segment."""
    return [run.length for run in table for _ in range(run.segments)]


def positions_of(table: tuple[Run, ...], device: torch.device) -> Tensor:
    """(T,): each segment counts from 0."""
    return torch.cat(
        [torch.arange(run.length, device=device).repeat(run.segments) for run in table]
    )


@dataclass(frozen=True, slots=True)
class How:
    """What a pass depends on beside its tokens."""

    table: tuple[Run, ...]
    selected: Selected
    kept: int | None = None
    """Blocks that do not run again for the backward pass; None = all."""


class DecoderFunction(torch.autograd.Function):
    """The decoder as one node of a graph: its backward pass adds to the adapter's gradient itself."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, decoder: Decoder, tokens: Tensor, how: How) -> Tensor:
        ctx.decoder, ctx.tape = decoder, []
        return decoder.forward(tokens, how.table, how.selected, ctx.tape, how.kept)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, ...]:
        ctx.decoder.backward(upstream[0], ctx.tape)
        return (None,) * 4
