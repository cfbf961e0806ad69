"""Where the rows of one decode step keep their keys and values, and how they look back at them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill_worker.fast.cache import FastCache
from gristmill_worker.fast.slots import Slots


@dataclass(slots=True, kw_only=True)
class Mixed:
    """First the rows of the pool, in the order of their slots; then whole groups, one after another."""

    pool: Slots | None
    groups: Sequence[FastCache]
    device: torch.device
    positions: Tensor = field(init=False)
    """(B,)."""
    count: int = field(init=False, default=0)
    """Rows of the pool."""
    at: Tensor = field(init=False)
    lengths: Tensor = field(init=False)
    hidden: dict[int | None, Tensor] = field(init=False, default_factory=dict)

    def open(self, like: Tensor) -> None:
        """Have room for one more token of each row."""
        lengths = [] if self.pool is None else [slot.length for slot in self.pool.rows]
        self.count = len(lengths)
        if self.pool is not None and lengths:
            self.pool.room_for(self.count, max(lengths) + 1, like)
        for group in self.groups:
            group.room_for(1, like)
        shared = [group.length for group in self.groups for _ in range(group.rows)]
        self.positions = torch.tensor(lengths + shared, device=self.device)
        self.lengths = self.positions[: self.count]
        self.at = torch.arange(self.count, device=self.device)

    def attend(
        self, layer: int, q: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """q (B, H, D), scaled, key and value (B, KV, D) of the new tokens -> (B, H, D)."""
        parts: list[Tensor] = []
        if self.pool is not None and self.count:
            own = slice(0, self.count)
            self.pool.put(layer, self.at, self.lengths, key[own], value[own])
            parts.append(self.pool.attend(layer, q[own], self._hidden(window)))
        start = self.count
        for group in self.groups:
            rows, whole = slice(start, start + group.rows), slice(0, group.rows)
            group.put(layer, key[rows], value[rows], whole)
            parts.append(group.attend(layer, q[rows], window, whole))
            start += group.rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _hidden(self, window: int | None) -> Tensor:
        """(n, W): True before a row's window and behind its newest token."""
        if window not in self.hidden:
            columns = torch.arange(int(self.lengths.max()) + 1, device=self.device)
            hidden = columns[None] > self.lengths[:, None]
            if window is not None:
                hidden |= columns[None] <= self.lengths[:, None] - window
            self.hidden[window] = hidden
        return self.hidden[window]

    def close(self) -> None:
        """Every row has one token more."""
        for slot in [] if self.pool is None else self.pool.rows:
            slot.length += 1
        for group in self.groups:
            group.used += 1


@dataclass(slots=True, kw_only=True)
class Alone:
    """A tile of rows, each looking back alone, filled up with rows that see nothing.

    Nothing here depends on who shares the tile: all shapes are the row's own or the tile's.
    """

    rows: Sequence[tuple[FastCache, int]]
    tile: int
    device: torch.device
    positions: Tensor = field(init=False)

    def open(self, like: Tensor) -> None:
        for cache, _ in self.rows:
            cache.room_for(1, like)
        spare = [0] * (self.tile - len(self.rows))
        self.positions = torch.tensor(
            [cache.length for cache, _ in self.rows] + spare, device=self.device
        )

    def attend(
        self, layer: int, q: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        out = torch.zeros_like(q)
        for index, (cache, row) in enumerate(self.rows):
            one, own = slice(index, index + 1), slice(row, row + 1)
            cache.put(layer, key[one], value[one], own)
            out[one] = cache.attend(layer, q[one], window, own)
        return out


Seats = Mixed | Alone
