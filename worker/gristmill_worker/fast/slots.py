"""Keys and values of single continuations, each in a slot of one pool, so that one kernel serves them all."""

import torch
from torch import Tensor

from gristmill_worker.fast.cache import ROOM_MIN, FastCache
from gristmill_worker.fast.shape import Shape

SLOTS_MIN = 4
"""Slots of a new pool; they double."""


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

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows: list[Slot] = []

    def take(self, prompt: FastCache) -> Slot:
        """A slot that holds a copy of this prompt."""
        slot = Slot(self, len(self.rows), prompt.prefix_length)
        self.room_for(len(self.rows) + 1, slot.length + 1, prompt.shared[0][0])
        for layer in range(self.shape.layers):
            key, value = prompt.prefix(layer)
            self.keys[layer][slot.at, :, : slot.length] = key
            self.values[layer][slot.at, :, : slot.length] = value
        self.rows.append(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """The last row moves into its place."""
        if slot.at >= len(self.rows) or self.rows[slot.at] is not slot:
            return  # released before
        last = self.rows.pop()
        if last is not slot:
            for pool in (*self.keys, *self.values):
                pool[slot.at, :, : last.length] = pool[last.at, :, : last.length]
            last.at = slot.at
            self.rows[last.at] = last
        if not self.rows:
            self.keys, self.values = [], []

    def room_for(self, rows: int, positions: int, like: Tensor) -> None:
        """Grow by doubling. What is not filled is zero: a hidden position must not be NaN."""
        s = self.shape
        slots, room = (self.keys[0].shape[0], self.keys[0].shape[2]) if self.keys else (0, 0)
        if rows <= slots and positions <= room:
            return
        size = (
            slots if rows <= slots else max(SLOTS_MIN, rows, 2 * slots), s.kv_heads,
            room if positions <= room else max(ROOM_MIN, positions, 2 * room), s.head_size,
        )  # fmt: skip
        self.keys = [_grown(self.keys[i] if slots else None, size, like) for i in range(s.layers)]
        self.values = [
            _grown(self.values[i] if slots else None, size, like) for i in range(s.layers)
        ]

    def put(self, layer: int, at: Tensor, lengths: Tensor, key: Tensor, value: Tensor) -> None:
        """(n, KV, D) of the next position of each row."""
        self.keys[layer][at, :, lengths] = key
        self.values[layer][at, :, lengths] = value

    def attend(self, layer: int, q: Tensor, hidden: Tensor) -> Tensor:
        """q (n, H, D), scaled; hidden (n, W) True where a row sees nothing -> (n, H, D)."""
        s, (count, width) = self.shape, hidden.shape
        keys = self.keys[layer][:count, :, :width]
        grouped = q.view(count, s.kv_heads, s.group, s.head_size)
        scores = torch.matmul(grouped, keys.transpose(2, 3)).float()
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        p = torch.softmax(scores, -1).to(q.dtype)
        return torch.matmul(p, self.values[layer][:count, :, :width]).reshape(q.shape)


def _grown(old: Tensor | None, size: tuple[int, ...], like: Tensor) -> Tensor:
    new = like.new_zeros(size)
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new
