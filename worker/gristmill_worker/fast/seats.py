"""Where the rows of one decode step keep their keys and values, and how they look back at them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gristmill_worker.fast.cache import FastCache
from gristmill_worker.fast.slots import Slots


@dataclass(slots=True, kw_only=True)
class PoolRows:
    """The rows of one pool in this step."""

    pool: Slots
    at: Tensor
    """(n,) slots."""
    lengths: Tensor
    """(n,) positions that each row has behind it."""
    hidden: dict[int | None, Tensor] = field(default_factory=dict)
    """By window, (n, room): True before a row's window and behind its newest token."""

    def attend(
        self, layer: int, q: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        self.pool.put(layer, self.at, self.lengths, key, value)
        if window not in self.hidden:
            columns = torch.arange(self.pool.room, device=q.device)
            hidden = columns[None] > self.lengths[:, None]
            if window is not None:
                hidden |= columns[None] <= self.lengths[:, None] - window
            self.hidden[window] = hidden
        return self.pool.attend(layer, q, self.hidden[window])


@dataclass(slots=True, kw_only=True)
class Mixed:
    """First the rows of the pools, in the order of their slots; then whole groups, one after another."""

    pools: Sequence[Slots]
    groups: Sequence[FastCache]
    device: torch.device
    positions: Tensor = field(init=False)
    """(B,)."""
    loose: list[PoolRows] = field(init=False)

    def open(self, like: Tensor) -> None:
        """Have room for one more token of each row."""
        for group in self.groups:
            group.room_for(1, like)
        self.loose = [
            PoolRows(
                pool=pool,
                at=torch.arange(len(pool.rows), device=self.device),
                lengths=torch.tensor([row.length for row in pool.rows], device=self.device),
            )
            for pool in self.pools
        ]
        shared = [group.length for group in self.groups for _ in range(group.rows)]
        ends = torch.tensor(shared, dtype=torch.int64, device=self.device)
        self.positions = torch.cat([*(each.lengths for each in self.loose), ends])

    def attend(
        self, layer: int, q: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """q (B, H, D), scaled, key and value (B, KV, D) of the new tokens -> (B, H, D)."""
        parts: list[Tensor] = []
        start = 0
        for each in self.loose:
            rows = slice(start, start + len(each.lengths))
            parts.append(each.attend(layer, q[rows], key[rows], value[rows], window))
            start = rows.stop
        for group in self.groups:
            rows, whole = slice(start, start + group.rows), slice(0, group.rows)
            group.put(layer, key[rows], value[rows], whole)
            parts.append(group.attend(layer, q[rows], window, whole))
            start = rows.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def close(self) -> None:
        """Every row has one token more."""
        for pool in self.pools:
            for slot in pool.rows:
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
