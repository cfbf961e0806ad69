"""The fast path as a base model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gristmill_contracts.errors import InvalidRequestError
from gristmill_worker.adapter import Adapter
from gristmill_worker.base_model import BaseModel, Part
from gristmill_worker.facts import ModelFacts
from gristmill_worker.fast import kernels
from gristmill_worker.fast.cache import FastCache
from gristmill_worker.fast.decoder import Decoder, DecoderFunction, How, Parts, Selected
from gristmill_worker.fast.factors import Stacks
from gristmill_worker.fast.linear import Factors, Shared, packing_works
from gristmill_worker.fast.native import NativeStep, native_step
from gristmill_worker.fast.output import head_of
from gristmill_worker.fast.rope import Rope, frequencies_of
from gristmill_worker.fast.seats import Alone, Mixed
from gristmill_worker.fast.shape import Shape, read_config, shape_of
from gristmill_worker.fast.sharded import ShardedBlocks
from gristmill_worker.fast.slots import Pools, Slot
from gristmill_worker.fast.weights import (
    PROJECTIONS,
    Block,
    fused_layers,
    layer_names,
    layer_shapes,
    load_weights,
)
from gristmill_worker.head import ROWS_MIN, Head
from gristmill_worker.lora import LayerGradient
from gristmill_worker.runs import Run, runs_of

COMPILE_PARAMETERS_MIN: Final = 50_000_000
"""Compiling takes seconds at every start; a smaller model never earns them back."""
PROMPT_BLOCK: Final = 256
"""Tokens of a prompt that run at once: enough for full matrix products, and soon over."""
NOTHING: Final = Selected()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Consecutive rows of a stream, their adapter, and where its gradient goes."""

    adapter: Adapter
    gradient: list[LayerGradient] | None
    rows: int


class FastModel(BaseModel):
    """`decoder` runs it; an adapter's fused factors are made once for each of its versions."""

    path = "fast"
    packed = True
    block = PROMPT_BLOCK
    retries = True
    compiles = False
    """Whether kernels are worth compiling: a large model's are."""

    def __init__(self, *, folder: Path, facts: ModelFacts, decoder: Decoder, head: Head) -> None:
        shape = decoder.shape
        super().__init__(
            folder=folder, facts=facts, head=head, names=layer_names(shape),
            shapes=layer_shapes(shape), why=f"{shape.family} is a Llama-shaped decoder",
        )  # fmt: skip
        self.decoder = decoder
        self.fused = fused_layers(shape)
        blocks = decoder.weights.blocks
        self.shards = blocks if isinstance(blocks, ShardedBlocks) else None
        self.pools = Pools(shape)
        self._native: NativeStep | Decoder | None = None
        self.now = NOTHING
        self.anchor = torch.zeros((), device=head.weight.device, requires_grad=True)

    @property
    def mode(self) -> str:  # type: ignore[override]
        packed = "packed" if self.decoder.weights.packed else "plain"
        return f"{self.decoder.kernels.mode}+{packed}"

    @contextmanager
    def selected(
        self, adapter: Adapter | None, gradient: list[LayerGradient] | None = None
    ) -> Iterator[None]:
        with self._running(NOTHING if adapter is None else self._one(adapter, gradient)):
            yield

    @contextmanager
    def selected_each(self, served: Sequence[Served]) -> Iterator[None]:
        """Run several adapters' rows in one stream: they follow each other from its first row to its last."""
        spans: list[tuple[slice, Selected]] = []
        at = 0
        for each in served:
            spans.append((slice(at, at + each.rows), self._one(each.adapter, each.gradient)))
            at += each.rows
        with self._running(Selected(spans=tuple(spans))):
            yield

    @contextmanager
    def _running(self, selected: Selected) -> Iterator[None]:
        self.now = selected
        try:
            yield
        finally:
            self.now = NOTHING

    def _one(self, adapter: Adapter, gradient: list[LayerGradient] | None) -> Selected:
        parts = None if gradient is None else by_fused_layer(list(map(tuple, gradient)))
        return Selected(factors=self._factors(adapter), gradient=parts, scale=adapter.scale)

    def _factors(self, adapter: Adapter) -> list[Factors]:
        stacks: Stacks | None = adapter.fused
        if stacks is None:
            stacks = adapter.fused = Stacks(
                self.fused, self.decoder.shape.layers, adapter.rank, adapter.weights, self.dtype
            )
        if stacks.version != adapter.version:
            stacks.fill(adapter.weights, adapter.scale)
            stacks.version = adapter.version
        return stacks.factors

    def hidden(self, tokens: Tensor) -> Tensor:
        count, length = tokens.shape
        return self.hidden_packed(tokens.reshape(-1), (Run(0, length, count),))

    def hidden_packed(self, tokens: Tensor, table: tuple[Run, ...]) -> Tensor:
        rank = self.now.rank
        if not rank or not torch.is_grad_enabled():
            return self.decoder.forward(tokens, table, self.now, None)
        kept = None if self.keeper is None else self.keeper.layers(table, rank)
        hidden: Tensor = DecoderFunction.apply(
            self.anchor, self.decoder, tokens, How(table, self.now, kept)
        )
        return hidden

    # --- decoding --------------------------------------------------------------------------------

    @property
    def position_bytes(self) -> int:
        shape = self.decoder.shape
        return 2 * shape.layers * shape.kv_size * self.dtype.itemsize

    def new_cache(self, room: int = 0) -> FastCache:
        return FastCache(self.decoder.shape, room)

    def prefill(self, tokens: Tensor, cache: FastCache) -> Tensor:
        return self.decoder.prefill(tokens, cache, self.now)

    @property
    def joins(self) -> bool:  # type: ignore[override]
        return not self.invariant

    def prefill_each(self, prompts: Sequence[Part]) -> Tensor:
        """In one stream, prompts of the same adapter beside each other, equal lengths too."""
        owners = list({id(each.adapter): None for each in prompts})
        order = sorted(
            range(len(prompts)),
            key=lambda at: (owners.index(id(prompts[at].adapter)), len(prompts[at].tokens)),
        )
        placed = [prompts[at] for at in order]
        lengths = [len(each.tokens) for each in placed]
        tokens = torch.cat([each.tokens for each in placed])
        hidden = self.decoder.prefill_each(
            tokens, runs_of(lengths), [each.cache for each in placed], self._serving(placed)
        )
        ends = torch.tensor(lengths).cumsum(0) - 1
        last = torch.empty_like(ends)
        last[torch.tensor(order)] = ends
        return hidden[last.to(hidden.device)]

    def _serving(self, placed: Sequence[Part]) -> Selected:
        """Who serves which rows of these prompts' stream; those of one adapter lie together."""
        spans: list[tuple[slice, Selected]] = []
        start = 0
        for adapter, members in groupby(placed, key=lambda each: each.adapter):
            end = start + sum(len(each.tokens) for each in members)
            own = NOTHING if adapter is None else self._one(adapter, None)
            spans.append((slice(start, end), own))
            start = end
        return spans[0][1] if len(spans) == 1 else Selected(spans=tuple(spans))

    def begin(self, cache: FastCache, rows: int) -> FastCache | Slot:
        """A single row moves into a pool, unless it must see nobody else there."""
        if rows == 1 and not self.invariant:
            return self.pools.take(cache)
        cache.repeat(rows)
        return cache

    def decode(self, parts: Sequence[Part]) -> Tensor:
        stepper = self._stepper()
        if self.invariant and stepper is self.decoder:
            return self._decode_alone(parts)
        self.pools.make_room()
        order = sorted(range(len(parts)), key=lambda at: _place(parts[at].cache))
        starts, start = [0] * len(parts), 0
        for at in order:
            starts[at], start = start, start + parts[at].tokens.shape[0]
        groups = [parts[at].cache for at in order if isinstance(parts[at].cache, FastCache)]
        seats = Mixed(pools=self.pools.live(), groups=groups, device=self.device)
        tokens = torch.cat([parts[at].tokens for at in order])
        everyone = torch.arange(start, device=self.device)
        places = [everyone[s : s + len(p.tokens)] for s, p in zip(starts, parts, strict=True)]
        hidden = stepper.step(tokens, seats, self._adapters(parts, places))
        seats.close()
        return hidden[torch.cat(places)]

    def _stepper(self) -> NativeStep | Decoder:
        """Chosen at the first step, so that whoever trains alone builds nothing, and kept."""
        if self._native is None:
            self._native = (native_step(self.decoder) if self.compiles else None) or self.decoder
        return self._native

    def _adapters(self, parts: Sequence[Part], places: list[Tensor]) -> list[Shared]:
        """Who serves which places of the batch."""
        served: dict[int, tuple[Adapter, list[Tensor]]] = {}
        for part, rows in zip(parts, places, strict=True):
            if part.adapter is not None:
                served.setdefault(id(part.adapter), (part.adapter, []))[1].append(rows)
        return [
            Shared(torch.cat(rows), self._factors(adapter)) for adapter, rows in served.values()
        ]

    def _decode_alone(self, parts: Sequence[Part]) -> Tensor:
        """In tiles of rows with the same adapter: every shape is a tile's or the row's own."""
        rows: dict[int, list[tuple[Part, int, int]]] = {}
        place = 0
        for part in parts:
            for row in range(part.tokens.shape[0]):
                rows.setdefault(id(part.adapter), []).append((part, row, place))
                place += 1
        out: Tensor | None = None
        for members in rows.values():
            for at in range(0, len(members), ROWS_MIN):
                tile = members[at : at + ROWS_MIN]
                hidden = self._tile(tile)
                if out is None:
                    out = hidden.new_empty(place, hidden.shape[1])
                out[[each[2] for each in tile]] = hidden[: len(tile)]
        for part in parts:
            part.cache.used += 1
        assert out is not None
        return out

    def _tile(self, members: list[tuple[Part, int, int]]) -> Tensor:
        tokens = torch.zeros(ROWS_MIN, dtype=torch.int64, device=self.device)
        tokens[: len(members)] = torch.stack([part.tokens[row] for part, row, _ in members])
        seats = Alone(
            rows=[(part.cache, row) for part, row, _ in members],
            tile=ROWS_MIN,
            device=self.device,
        )
        adapter = members[0][0].adapter
        everyone = torch.arange(ROWS_MIN, device=self.device)
        served = [] if adapter is None else [Shared(everyone, self._factors(adapter))]
        return self.decoder.step(tokens, seats, served)

    def hidden_cached(self, tokens: Tensor, cache: FastCache) -> Tensor:
        if cache.length == 0 and tokens.shape[0] == 1:
            return self.prefill(tokens[0], cache)[None]
        everyone = torch.arange(tokens.shape[0], device=self.device)
        factors = self.now.factors
        served = [] if factors is None else [Shared(everyone, factors)]
        steps = []
        for at in range(tokens.shape[1]):
            seats = Mixed(pools=[], groups=[cache], device=self.device)
            steps.append(self.decoder.step(tokens[:, at], seats, served))
            seats.close()
        return torch.stack(steps, dim=1)


def _place(cache: FastCache | Slot) -> tuple[int, int, int]:
    """Rows of the pools come first, shortest first, in the order of their slots."""
    return (0, cache.pool.room, cache.at) if isinstance(cache, Slot) else (1, 0, 0)


def by_fused_layer(views: list[Any]) -> list[Parts]:
    """(A, B) of each projection, grouped as the decoder fuses them."""
    grouped: list[Parts] = []
    at = 0
    while at < len(views):
        for members in PROJECTIONS:
            grouped.append(views[at : at + len(members)])
            at += len(members)
    return grouped


class Divider(Protocol):
    """What divides a base's blocks among the ranks of a team, where they want it."""

    def wanted(self, shape: Shape, dtype: torch.dtype) -> bool: ...
    def blocks(self, blocks: Iterator[Block]) -> ShardedBlocks: ...


def load_fast(
    folder: Path,
    facts: ModelFacts,
    *,
    dtype: torch.dtype,
    device: torch.device,
    divider: Divider | None = None,
) -> FastModel:
    """Raises InvalidRequestError if a weight is missing."""
    shape = shape_of(read_config(folder))
    divided = divider is not None and divider.wanted(shape, dtype)
    large = sum(rows * columns for rows, columns in layer_shapes(shape)) >= COMPILE_PARAMETERS_MIN
    # What is packed for oneDNN has no rows to divide.
    pack = not divided and device.type == "cpu" and packs(dtype, large=large)
    hold = divider.blocks if divider is not None and divided else tuple
    try:
        weights = load_weights(folder, shape, dtype=dtype, device=device, pack=pack, hold=hold)
    except KeyError as error:
        raise InvalidRequestError(
            f"{folder} has no weight {error.args[0]}; prepare the model again"
        ) from error
    rope = Rope(*frequencies_of(folder), device)
    chosen = kernels.compiled(dtype, device, shape.inner) if large else kernels.EAGER
    model = FastModel(
        folder=folder, facts=facts,
        decoder=Decoder(shape, weights, rope, chosen),
        head=head_of(weights.head, pack=pack and dtype == torch.float32),
    )  # fmt: skip
    model.compiles = large
    return model


def packs(dtype: torch.dtype, *, large: bool) -> bool:
    """Whether weights are packed for oneDNN, which runs float32 at twice MKL's speed on some CPUs.

    A small model gains nothing from float32 weights that lie in memory twice.
    """
    return (large or dtype == torch.bfloat16) and packing_works(dtype)
