"""Keys and values of single continuations, each in a slot of a pool, so that one kernel serves many.

A pool's slots all have the same room. A row that fills its slot moves to the pool with the next larger
one: a long row never makes the slots of short ones longer. A step reads slots as a whole, so that rooms
are not far apart.
"""

import torch
from torch import Tensor

from gristmill_worker.fast.cache import ROOM_MIN, FastCache
from gristmill_worker.fast.shape import Shape

SLOTS_MIN = 4
"""Slots of a new pool."""
THREE_QUARTERS_FROM = 256
"""Between this and its half there is a room of three quarters; below, reading less saves nothing."""


class Slot:
    """One row's place. `length` positions are filled: its prompt and its own tokens."""

    rows = 1

    def __init__(self, pool: "Slots", at: int, length: int) -> None:
        self.pool = pool
        self.at = at
        self.length = length

    def repeat(self, rows: int) -> None:
        raise ValueError(f"a slot holds one row, not {rows}")

    def select(self, at: Tensor) -> None:
        """Keep the row, or give the slot back."""
        if not at.numel():
            self.release()

    def copy(self) -> "Slot":
        raise ValueError("a slot is one row's alone")

    def release(self) -> None:
        self.pool.release(self)


class Slots:
    """`keys` and `values` (S, KV, room, D) of each layer; rows fill the first slots, without a hole."""

    def __init__(self, shape: Shape, room: int) -> None:
        self.shape = shape
        self.room = room
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows: list[Slot] = []

    def open(self, like: Tensor) -> int:
        """The next free slot. A quarter more are made where none is."""
        count = len(self.rows)
        slots = self.keys[0].shape[0] if self.keys else 0
        if count == slots:
            s = self.shape
            size = (max(SLOTS_MIN, count + 1, count * 5 // 4), s.kv_heads, self.room, s.head_size)
            old: list[Tensor | None] = [*self.keys, *self.values] or [None] * (2 * s.layers)
            grown = [_grown(each, size, like) for each in old]
            self.keys, self.values = grown[: s.layers], grown[s.layers :]
        return count

    def fill(self, layer: int, at: int, key: Tensor, value: Tensor) -> None:
        """(KV, n, D): the first n positions of a slot.

        What is behind them weighs nothing, but not a number times nothing is not nothing: what another
        row left there goes.
        """
        count = key.shape[1]
        self.keys[layer][at, :, :count] = key
        self.values[layer][at, :, :count] = value
        self.values[layer][at, :, count:] = 0

    def release(self, slot: Slot) -> None:
        """The last row moves into its place."""
        if slot.at >= len(self.rows) or self.rows[slot.at] is not slot:
            return  # released before
        last = self.rows.pop()
        if last is not slot:
            for pool in (*self.keys, *self.values):
                pool[slot.at] = pool[last.at]
            last.at = slot.at
            self.rows[last.at] = last
        if not self.rows:
            self.keys, self.values = [], []

    def put(self, layer: int, at: Tensor, lengths: Tensor, key: Tensor, value: Tensor) -> None:
        """(n, KV, D) of the next position of each row."""
        self.keys[layer][at, :, lengths] = key
        self.values[layer][at, :, lengths] = value

    def attend(self, layer: int, q: Tensor, hidden: Tensor) -> Tensor:
        """q (n, H, D), scaled; hidden (n, room) True where a row sees nothing -> (n, H, D).

        Over the whole room: a part of it would be copied before each product, which takes longer.
        """
        s, count = self.shape, q.shape[0]
        keys, values = (each[layer][:count].flatten(0, 1) for each in (self.keys, self.values))
        grouped = q.view(count * s.kv_heads, s.group, s.head_size)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).view(count, s.heads, self.room)
        p = _seen(scores, hidden).view(count * s.kv_heads, s.group, self.room)
        return torch.bmm(p, values).view(q.shape)


class Pools:
    """All of a model's pools, by their room."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.by_room: dict[int, Slots] = {}

    def take(self, prompt: FastCache) -> Slot:
        """A slot that holds a copy of this prompt."""
        pool = self._for(prompt.prefix_length + 1)
        slot = Slot(pool, pool.open(prompt.shared[0][0]), prompt.prefix_length)
        for layer in range(self.shape.layers):
            pool.fill(layer, slot.at, *prompt.prefix(layer))
        pool.rows.append(slot)
        return slot

    def make_room(self) -> None:
        """Move every row whose slot is full."""
        full = [row for pool in self.live() for row in pool.rows if row.length == pool.room]
        for slot in full:
            old, at, new = slot.pool, slot.at, self._for(slot.length + 1)
            moved = new.open(old.keys[0])
            for layer in range(self.shape.layers):
                new.fill(layer, moved, old.keys[layer][at], old.values[layer][at])
            old.release(slot)
            slot.pool, slot.at = new, moved
            new.rows.append(slot)

    def live(self) -> list[Slots]:
        """Those that hold rows, shortest first."""
        return [self.by_room[room] for room in sorted(self.by_room) if self.by_room[room].rows]

    def _for(self, length: int) -> Slots:
        room = room_for(length)
        return self.by_room.setdefault(room, Slots(self.shape, room))


def room_for(length: int) -> int:
    """A power of two; from 129 on, three quarters of it where that is enough."""
    whole = max(ROOM_MIN, 1 << (length - 1).bit_length())
    most = whole // 4 * 3
    return most if length <= most and whole >= THREE_QUARTERS_FROM else whole


def _seen(scores: Tensor, hidden: Tensor) -> Tensor:
    """(n, H, room) and (n, room) -> probabilities of what is not hidden."""
    wide = scores.float()
    wide.masked_fill_(hidden[:, None], -torch.inf)
    return torch.softmax(wide, -1).to(scores.dtype)


def _grown(old: Tensor | None, size: tuple[int, ...], like: Tensor) -> Tensor:
    """What is not filled is zero: a hidden position must not be NaN."""
    new = like.new_zeros(size)
    if old is not None:
        new[: old.shape[0]] = old
    return new
