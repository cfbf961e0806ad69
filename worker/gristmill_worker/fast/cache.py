"""Keys and values of a growing batch: a prompt's, shared by all rows, and each row's own behind it."""

import torch
from torch import Tensor

from gristmill_worker.fast.shape import Shape

ROOM_MIN = 64
"""Positions that a row's own part has room for at first; it doubles."""


class FastCache:
    """`prefix` (KV, P, D) of each layer belongs to every row; `own` (B, KV, room, D) is filled up to `used`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.prefix: list[tuple[Tensor, Tensor]] = []
        self.own: list[tuple[Tensor, Tensor]] = []
        self.rows = 1
        self.used = 0

    @property
    def prefix_length(self) -> int:
        return self.prefix[0][0].shape[1] if self.prefix else 0

    @property
    def length(self) -> int:
        """Positions that the next token comes behind."""
        return self.prefix_length + self.used

    def repeat(self, rows: int) -> None:
        """One row becomes `rows` equal ones. Raises ValueError once rows have parts of their own."""
        if self.used:
            raise ValueError("rows differ already; repeat the cache before the first token")
        self.rows = rows
        self.own = []

    def select(self, at: Tensor) -> None:
        """Keep these rows, in this order."""
        self.rows = at.shape[0]
        self.own = [(k[at], v[at]) for k, v in self.own]

    def copy(self) -> "FastCache":
        """Shares the prefix, which never changes."""
        twin = FastCache(self.shape)
        twin.prefix, twin.rows, twin.used = self.prefix, self.rows, self.used
        twin.own = [(k.clone(), v.clone()) for k, v in self.own]
        return twin

    def room_for(self, count: int, like: Tensor) -> None:
        """Have room for `count` more positions in every layer."""
        s = self.shape
        if not self.own:
            size = (self.rows, s.kv_heads, max(ROOM_MIN, count), s.head_size)
            self.own = [(like.new_empty(size), like.new_empty(size)) for _ in range(s.layers)]
        room = self.own[0][0].shape[2]
        if self.used + count > room:
            more = max(room, count)
            self.own = [
                (torch.nn.functional.pad(k, (0, 0, 0, more)), torch.nn.functional.pad(v, (0, 0, 0, more)))
                for k, v in self.own
            ]  # fmt: skip

    def put(self, layer: int, key: Tensor, value: Tensor) -> None:
        """(B, KV, 1, D) of the next position."""
        k, v = self.own[layer]
        k[:, :, self.used : self.used + 1] = key
        v[:, :, self.used : self.used + 1] = value

    def attend(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """q (B, H, D) of the next position, scaled -> (B, H, D). Its own key is in already."""
        s, count = self.shape, self.used + 1
        keys, values = (part[:, :, :count] for part in self.own[layer])
        grouped = q.view(self.rows, s.kv_heads, s.group, s.head_size)
        own = torch.matmul(grouped, keys.transpose(2, 3))
        length = self.prefix_length
        if not length:
            return torch.matmul(self._seen(own, window), values).reshape(q.shape)
        shared_k, shared_v = self.prefix[layer]
        folded = grouped.transpose(0, 1).reshape(s.kv_heads, self.rows * s.group, s.head_size)
        shared = torch.bmm(folded, shared_k.transpose(1, 2))
        shared = shared.view(s.kv_heads, self.rows, s.group, length).transpose(0, 1)
        p = self._seen(torch.cat([shared, own], -1), window)
        over = p[..., :length].transpose(0, 1).reshape(s.kv_heads, self.rows * s.group, length)
        out = torch.bmm(over, shared_v).view(s.kv_heads, self.rows, s.group, s.head_size)
        return (out.transpose(0, 1) + torch.matmul(p[..., length:], values)).reshape(q.shape)

    @staticmethod
    def _seen(scores: Tensor, window: int | None) -> Tensor:
        """Probabilities over all positions, the oldest ones outside the window left out."""
        wide = scores.float()
        if window is not None and wide.shape[-1] > window:
            wide[..., : wide.shape[-1] - window] = -torch.inf
        return torch.softmax(wide, -1).to(scores.dtype)
